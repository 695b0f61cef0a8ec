"""What a draft proposes along a trace, and how much it can propose.

Only the proposals of a row up to the first wrong one count. A caller says which rows it
counts; then nothing is computed after a wrong proposal unless other rows need it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...quantize.drafts.forward import BLOCK_ROWS, Alive, DraftForward, DraftPass, not_finite
from ...quantize.drafts.geometry import Geometry

FEWEST_ROWS = 16
"""Least number of rows to multiply together: with fewer, libraries sum in another order."""


class CountedRows:
    """The counted rows of the B sequences of a batch, updated pass by pass; None = all."""

    def __init__(self, counted: Sequence[range] | None) -> None:
        self._counted = counted
        self._rows: Tensor | None = None
        self._left: Tensor | None = None

    @property
    def alive(self) -> Alive | None:
        """The `alive` argument of `DraftForward.passes`."""
        return None if self._counted is None else lambda: self._left

    def any_in(self, drafted: DraftPass, depth: int) -> bool:
        """Move to a depth of a pass; True if any of its rows counts."""
        if depth == 0:
            self._rows = self._left = self._counted_in(drafted.rows, drafted.hidden.device)
        return self._rows is None or len(self._rows) > 0

    def states(self, drafted: DraftPass, depth: int) -> Tensor:
        """[n, W], the states of the rows that count."""
        states = drafted.hidden[:, :, depth - drafted.depths.start]
        return states.flatten(0, 1) if drafted.kept is not None else self.of(states)

    def of(self, values: Tensor) -> Tensor:
        """[B, R, ...] for all rows of a pass -> [n, ...]."""
        flat = values.flatten(0, 1)
        return flat if self._rows is None else flat[self._rows]

    def put(self, into: Tensor, values: Tensor) -> None:
        """Write values [n] to their places in [B, R]."""
        if self._rows is None:
            into.copy_(values.view(into.shape))
        else:
            into[self._rows // into.shape[1], self._rows % into.shape[1]] = values

    def go_on(self, drafted: DraftPass, *, states: Tensor, top: Tensor, possible: Tensor) -> None:
        """Drop rows that cannot be accepted; all results of the device come in one copy.

        For `states` [n, W], `top` [n] are the largest logits, and `possible` [n] bool says whether
        the proposal may be accepted. NaN and infinity are refused.
        """
        sound = torch.stack((torch.isfinite(states).all(), torch.isfinite(top).all()))
        seen = _read(torch.cat((sound, possible)))
        if not seen[0]:
            raise not_finite(drafted.where, "hidden states")
        if not seen[1]:
            raise not_finite(f"draft rows {drafted.rows[0]} to {drafted.rows[-1]}", "logits")
        still = torch.from_numpy(seen[2:].nonzero()[0])
        if self._counted is None or len(still) == len(possible):
            self._left = None if drafted.kept is not None else self._rows
            return
        still = _enough(still).to(possible.device)
        self._rows = still if self._rows is None else self._rows[still]
        self._left = still if drafted.kept is not None else self._rows

    def _counted_in(self, rows: range, device: torch.device) -> Tensor | None:
        """[n] int64, which of the B * R rows of a block count, sequence by sequence; None = all."""
        if self._counted is None:
            return None
        inside = [range(max(c.start, rows.start), min(c.stop, rows.stop)) for c in self._counted]
        if all(len(r) == len(rows) for r in inside):
            return None
        places = [
            torch.arange(r.start, max(r.start, r.stop)) + i * len(rows) - rows.start
            for i, r in enumerate(inside)
        ]
        return _enough(torch.cat(places)).to(device)


def _read(flags: Tensor) -> npt.NDArray[np.bool_]:
    values: npt.NDArray[np.bool_] = flags.cpu().numpy()
    return values


def _enough(rows: Tensor) -> Tensor:
    """The rows; if too few, the last one is repeated; no rows stay no rows."""
    missing = FEWEST_ROWS - len(rows)
    return torch.cat((rows, rows[-1:].expand(missing))) if len(rows) and missing > 0 else rows


MAX_LOGITS = 2**26  # elements of the logits of one part of the rows: 256 MB in float32
NOTHING = -1  # marks a proposal that was not computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """What a draft proposes from R rows at K depths.

    Its most likely tokens: row i, column j is for position first_row + i + 2 + j, or `NOTHING`
    where that does not count. Log-probabilities of the recorded tokens are -infinity for those that
    it cannot propose, and where that does not count; None where no temperature is given.
    """

    token_ids: Tensor  # [R, K] int64, in the target's vocabulary
    recorded_logprobs: Tensor | None = None  # [R, K] float32

    def of_sequence(self, i: int, rows: slice) -> "Proposals":
        """Some rows of one sequence of a batch."""
        return self._each(lambda values: values[i, rows])

    def cpu(self) -> "Proposals":
        """The same tensors on the CPU."""
        return self._each(Tensor.cpu)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Proposals":
        logprobs = self.recorded_logprobs
        return Proposals(
            token_ids=change(self.token_ids),
            recorded_logprobs=None if logprobs is None else change(logprobs),
        )


@torch.inference_mode()
def batch_proposals(
    forward: DraftForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    rows: range,
    num_draft_tokens: int,
    temperature: float | None = None,
    block_rows: int = BLOCK_ROWS,
    counted: Sequence[range] | None = None,
) -> Proposals:
    """What a draft proposes from the same R rows of several sequences, [B, R, K] each.

    `hidden` [B, N - 1, W] are the draft's rows of the target's features, `token_ids` [B, N] int64:
    nothing looks ahead, so shorter sequences may be padded at the end. Without a temperature above
    0 only its most likely tokens are computed. In the `counted` rows, proposals count up
    to the first one that can never be accepted; None = every proposal of every row.
    """
    shape = (len(token_ids), len(rows), num_draft_tokens)
    best = token_ids.new_full(shape, NOTHING)
    logprobs = None
    if temperature is not None:
        logprobs = hidden.new_full(shape, -torch.inf, dtype=torch.float32)
    chooser = _Chooser(forward, token_ids, temperature)
    looked_at = CountedRows(counted)
    for drafted in forward.passes(
        hidden,
        token_ids,
        rows=rows,
        num_draft_tokens=num_draft_tokens,
        block_rows=block_rows,
        alive=looked_at.alive,
    ):
        at = slice(drafted.rows.start - rows.start, drafted.rows.stop - rows.start)
        after = token_ids[:, drafted.rows.start + 2 :].unfold(1, num_draft_tokens, 1)
        for depth in drafted.depths:
            if not looked_at.any_in(drafted, depth):
                break
            states = looked_at.states(drafted, depth)
            recorded = looked_at.of(after[:, : len(drafted.rows), depth])
            top, likely, drawn = chooser.choose(states, recorded)
            looked_at.put(best[:, at, depth], likely)
            if logprobs is not None and drawn is not None:
                looked_at.put(logprobs[:, at, depth], drawn)
            possible = likely == recorded if drawn is None else drawn > -torch.inf
            looked_at.go_on(drafted, states=states, top=top, possible=possible)
    return Proposals(token_ids=best, recorded_logprobs=logprobs)


class _Chooser:
    """What a draft proposes from hidden states of one depth, by logits of some rows at a time."""

    def __init__(self, forward: DraftForward, token_ids: Tensor, temperature: float | None) -> None:
        self._forward = forward
        self._temperature = temperature
        self._draft_ids = None if temperature is None else draft_ids_of(forward, token_ids)

    def choose(self, states: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """[n] each: the largest logits, their tokens, and log-probabilities of recorded tokens."""
        if self._draft_ids is None or self._temperature is None:
            top, draft_ids = self._forward.largest_logits(states, MAX_LOGITS)
            return top, self._forward.to_target(draft_ids), None
        together = max(1, MAX_LOGITS // self._forward.num_logits)
        tops, likely, drawn = [], [], []
        parts = zip(torch.split(states, together), torch.split(recorded, together), strict=True)
        for some, tokens in parts:
            logits = self._forward.logits(some)
            top, draft_ids = logits.max(-1)
            tops.append(top)
            likely.append(self._forward.to_target(draft_ids))
            drawn.append(_logprobs_of(self._draft_ids[tokens], logits, self._temperature))
        return torch.cat(tops), torch.cat(likely), torch.cat(drawn)


def draft_ids_of(forward: DraftForward, token_ids: Tensor) -> Tensor:
    """[V] int64: the draft's id of every target token, -1 where it cannot propose it."""
    offered = forward.to_target(torch.arange(forward.num_logits, device=token_ids.device))
    draft_ids = offered.new_full((int(max(offered.max(), token_ids.max())) + 1,), -1)
    draft_ids[offered] = torch.arange(len(offered), device=offered.device)
    return draft_ids


def _logprobs_of(draft_ids: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """[R] float32 of draft ids [R], -1 for none, under logits [R, draft vocabulary]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = wide.float().log_softmax(-1).gather(-1, draft_ids.clamp(min=0)[..., None])[..., 0]
    return logprobs.masked_fill(draft_ids < 0, -torch.inf)


def num_draft_tokens_fault(geometry: Geometry, num_draft_tokens: int) -> tuple[str, str] | None:
    """What is wrong with a number of draft tokens for this draft, and how to put it right.

    Fewer masks make a shorter block, as vLLM 0.33 and SGLang 0.5.23 do.
    """
    if num_draft_tokens < 1:
        return f"expected at least 1, got {num_draft_tokens}", "give the number that will be served"
    limit = geometry.token_limit
    if limit is not None and num_draft_tokens > limit.tokens:
        return (
            f"expected at most {limit.tokens}, got {num_draft_tokens}: {limit.why}",
            f"give {limit.tokens} or less, as it will be served",
        )
    return None
