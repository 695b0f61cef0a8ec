"""What replay says of a verify step at every position of a text, and how clear its choices are.

An engine computes in BF16 with other kernels than replay. Where two tokens of the draft are nearly
as likely, either may come out on top; where they are not, both must choose alike. How far apart is
near is measured: replay in BF16 moves these distances against replay in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...calibration.passes.draft_inputs import filled_up, first_hidden_of_batch
from ...calibration.traces.prompt_trace import PromptTrace
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.drafts.forward import BLOCK_ROWS, DraftForward, whole_rows
from ...quantize.stored.loading import LoadedDraft
from ..counting.rounds import accepted_by_row

NEAR = 4.0
"""Distances below so many times what BF16 moves them (root mean square) are near ties."""


_OUT = -1e30
"""Stands for the logit of a token that a draft cannot propose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryPosition:
    """A round at each row of a continuation, in the order of the rows.

    Attributes:
        accepted: tokens of the round.
        distances: [R][K] between the recorded token's logit and the best other one's; below 0
            where the draft proposes another.
    """

    accepted: tuple[int, ...]
    distances: tuple[tuple[float, ...], ...]


def every_position(
    draft: LoadedDraft, traces: TraceFolder, trace: PromptTrace, num_draft_tokens: int
) -> EveryPosition:
    """Of one prompt; see `every_position_of_batch`."""
    return every_position_of_batch(draft, traces, [trace], num_draft_tokens)[0]


@torch.inference_mode()
def every_position_of_batch(
    draft: LoadedDraft, traces: TraceFolder, batch: Sequence[PromptTrace], num_draft_tokens: int
) -> list[EveryPosition]:
    """Of several prompts, by the draft in the dtype that it was loaded in.

    Args:
        draft: on any device; one whose inputs are rounded under one scale of a whole call
            (`rounds_alone` is False) gets one prompt at a time.
        traces: that hold the prompts, and fit the draft.
        batch: the prompts, filled up behind as in `proposals_of_batch`.
        num_draft_tokens: K, one that the draft can propose.

    Raises:
        ForwardError: the draft computes NaN or infinity.
    """
    own = [whole_rows(t.num_tokens, num_draft_tokens, first_row=t.prompt_length - 1) for t in batch]
    rows = range(min(one.start for one in own), max(one.stop for one in own))
    hidden = first_hidden_of_batch(draft, traces, batch)
    token_ids = torch.stack([filled_up(trace.token_ids, hidden.shape[1] + 1) for trace in batch])
    proposed = torch.empty((len(batch), len(rows), num_draft_tokens), dtype=torch.int64)
    distances = torch.empty(proposed.shape)
    # Row r at depth j predicts token r + 2 + j; what is filled up is nobody's, and cut off below.
    predicted = torch.arange(rows.start, rows.stop)[:, None] + 2 + torch.arange(num_draft_tokens)
    recorded = token_ids[:, predicted.clamp(max=token_ids.shape[1] - 1)]
    for one in draft.forward.passes(
        hidden,
        token_ids.to(draft.device),
        rows=rows,
        num_draft_tokens=num_draft_tokens,
        block_rows=max(1, BLOCK_ROWS // len(batch)),
    ):
        at = slice(one.rows.start - rows.start, one.rows.stop - rows.start)
        depths = slice(one.depths.start, one.depths.stop)
        logits = _by_token(draft.forward, draft.forward.logits(one.hidden).float())
        proposed[:, at, depths] = logits.argmax(-1)
        distances[:, at, depths] = _distances(logits, recorded[:, at, depths])
    found = []
    for i, (trace, mine) in enumerate(zip(batch, own, strict=True)):
        inside = slice(mine.start - rows.start, mine.stop - rows.start)
        found.append(
            EveryPosition(
                accepted=tuple(accepted_by_row(trace, proposed[i, inside])),
                distances=tuple(map(tuple, distances[i, inside].tolist())),
            )
        )
    return found


def noise(one: Sequence[EveryPosition], other: Sequence[EveryPosition]) -> float:
    """How far two ways of computing move the distances, root mean square over all positions.

    Whether a token is among those that a draft chooses from is no distance, and left out.
    """
    pairs = [(torch.tensor(a.distances), torch.tensor(b.distances))
             for a, b in zip(one, other, strict=True)]  # fmt: skip
    moved = [(a - b)[torch.minimum(a, b) > _OUT / 2] for a, b in pairs]
    return float(torch.cat([m.flatten() for m in moved]).square().mean().sqrt())


def _by_token(forward: DraftForward, logits: Tensor) -> Tensor:
    """[..., draft vocabulary] -> [..., target vocabulary], on the CPU; what it lacks comes last."""
    tokens = forward.to_target(torch.arange(logits.shape[-1], device=logits.device))
    whole = logits.new_full((*logits.shape[:-1], int(tokens.max()) + 1), _OUT)
    return whole.index_copy(-1, tokens, logits.clamp(min=_OUT)).cpu()


def _distances(logits: Tensor, recorded: Tensor) -> Tensor:
    own = logits.gather(-1, recorded[..., None])
    others = logits.scatter(-1, recorded[..., None], _OUT)
    return own[..., 0] - others.amax(-1)
