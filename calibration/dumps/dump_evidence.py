"""In which order a dump's layers stand, judged by the draft that reads them: its first step.

For targets that cannot be run here. A draft that gets the layers in another order, or those of
another token, predicts next to nothing; the next layer up or down costs it a third.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ...quantize.stored.loading import LoadedDraft
from ...quantize.stored.stored_tables import HEAD
from ...recipes.errors import TraceError
from ..passes.proposals import draft_predictions
from ..traces.target_tables import FINAL_NORM, SharedTables
from ..traces.trace_info import MIN_AGREEMENT, normalized
from .samples import Answer

# ---- The target's head on dumped last states: which of them it reads, and whether the text is its
# own
#
# argmax(head(norm?(h))) is the next token wherever the target chose it. Tried are states as they
# are
# and through the last norm, each as the state of the token of its row, of the one before and of
# the
# one behind it. The reading with which most answers are reproduced is the dump's.

SHIFTS = (-1, 0, 1)
"""Row i holds the state after token i + shift."""
MAX_ROWS = 256  # of an answer, evenly spaced
NEAR_TIE = 0.25
"""Nats. A text is dumped by one pass over it and was written token by token: in BF16 the two differ
by 0.06 on the shipped targets, and larger ones by some tenths."""
_OFF_POLICY = 0.3  # text of others is reproduced to a half or more, other tokens hardly

_NORMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "after the last norm": lambda hidden, _norm: hidden,
        "before the last norm": lambda hidden, norm: normalized(hidden) * norm,
        "before the last norm, 1 + its weights": lambda hidden, norm: (
            normalized(hidden) * (1 + norm)
        ),
    }
)
"""Where states may have been taken -> what the head reads of them, with the norm's weight [W]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFinding:
    """How dumped last states are to be read.

    Attributes:
        norm: where they were taken, in words.
        shift: see `SHIFTS`.
        share: of positions whose token is reproduced, in [0, 1], over the answers looked at.
    """

    norm: str
    shift: int
    share: float


class TargetHead:
    """The head [V, W] and the weight [W] of the norm before it, in float32."""

    def __init__(self, tables: SharedTables) -> None:
        self._head = tables[HEAD].float()
        self._norm = tables[FINAL_NORM].float()

    def settle(self, answers: Sequence[tuple[Answer, Tensor]]) -> HeadFinding:
        """Find the reading under which the head reproduces the answers.

        Args:
            answers: some of the dump, each with its sample's last states [N, W].

        Raises:
            TraceError: under no reading is any answer reproduced to 98 %.
        """
        shares = {
            reading: [self.share(answer, last, *reading) for answer, last in answers]
            for reading in product(_NORMS, SHIFTS)
        }
        best = max(shares, key=lambda r: (_reproduced(shares[r]), sum(shares[r])))
        share = sum(shares[best]) / len(answers)
        if not _reproduced(shares[best]):
            what = (
                "the text comes from a data set, or was sampled"
                if share >= _OFF_POLICY
                else (
                    "the tokens are those of another tokenizer, or the states those of another"
                    " target"
                )
            )
            raise TraceError(
                answers[0][0].sample.file.parent,
                f"the target wrote none of the {len(answers)} answers: at best, its head"
                f" predicts {share:.0%} of their tokens (with the states {best[0]},"
                f" {_beside(best[1])}), expected {MIN_AGREEMENT:.0%}. Probably {what}",
                fix="dump the target's own greedy answers, and give the target that was dumped",
            )
        return HeadFinding(norm=best[0], shift=best[1], share=share)

    def share(self, answer: Answer, last: Tensor, norm: str, shift: int) -> float:
        """Share of an answer's tokens that the head says, near ties included; 0 of no tokens."""
        positions = torch.arange(max(answer.start, 1), answer.stop)
        rows = positions - 1 - shift
        positions = positions[(rows >= 0) & (rows < len(last))]
        positions = positions[:: -(-len(positions) // MAX_ROWS) or 1]
        if not len(positions):
            return 0.0
        hidden = _NORMS[norm](last[positions - 1 - shift].float(), self._norm)
        logits = hidden @ self._head.T
        said = logits.gather(1, answer.sample.token_ids[positions, None])[:, 0]
        return float((logits.amax(dim=1) - said <= NEAR_TIE).double().mean())


def _reproduced(shares: Sequence[float]) -> int:
    return sum(share >= MIN_AGREEMENT for share in shares)


def _beside(shift: int) -> str:
    return "at the positions of their tokens" if not shift else f"shifted by {shift:+d} token"


MIN_ACCEPTED = 0.55
"""Published drafts accept 0.7 and more; with layers one off 0.50 was seen."""
MIN_POSITIONS = 200
_ALL_ORDERS = 4  # slots; of more, exchanges of two and the reverse are tried
CLEARLY = 3.0
"""Standard errors, of the positions where two orders differ, that one is better by."""

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFinding:
    """What the draft's first steps showed.

    Attributes:
        shift: row i belongs to token i + shift.
        accepted: share of the answers' tokens that the first step predicts, as the layers stand.
        positions: that were looked at.
        next_best: the same share in the best of the other orders; 0 for a single layer.
    """

    shift: int
    accepted: float
    positions: int
    next_best: float


class DraftSteps:
    """Counts of accepted first steps, for each order of the layers and shift, as answers go by.

    Args:
        layer_ids: that it reads, ascending; the dump has as many.
    """

    def __init__(self, draft: LoadedDraft, layer_ids: tuple[int, ...]) -> None:
        self._draft = draft
        self._layer_ids = layer_ids
        self._as_they_stand = tuple(range(len(layer_ids)))
        self._orders = tuple(dict.fromkeys(_orders(len(layer_ids))))
        self._hits: dict[tuple[Order, int], list[Tensor]] = {
            (order, shift): [] for order in self._orders for shift in (0, -1)
        }

    def add(self, answer: Answer) -> None:
        """Take in one answer."""
        token_ids = answer.sample.token_ids[: answer.stop]
        slots = answer.sample.aux.reshape(len(answer.sample.aux), len(self._layer_ids), -1)
        for (order, shift), hits in self._hits.items():
            features = slots[-shift : -shift + len(token_ids) - 1, order].flatten(1)
            hits.append(self._accepted(features, token_ids[: len(features) + 1], answer.start))

    def finding(self, where: Path) -> DraftFinding:
        """What all answers come to.

        Raises:
            TraceError: too few positions, another order is better, or the draft accepts little.
        """
        hits = {found: torch.cat(some).double() for found, some in self._hits.items()}
        best = max(hits, key=lambda found: float(hits[found].mean()))
        order, shift = best
        stand = hits[self._as_they_stand, shift]
        others = [hits[other, shift] for other in self._orders if other != self._as_they_stand]
        next_best = max(others, key=lambda other: float(other.mean()), default=0 * stand)
        share = {"best": hits[best], "stand": stand, "next": next_best}
        said = {name: f"{float(some.mean()):.0%}" for name, some in share.items()}
        step, whole = f"the first step of {self._draft.name}", "give the target's whole folder"
        fix = f"{whole}, so that the target can recompute its hidden states"
        if len(stand) < MIN_POSITIONS:
            what = (
                f"{len(stand)} positions of answers are too few to find out the order of the layers"
            )
            raise TraceError(where, f"{what}, expected at least {MIN_POSITIONS}", fix=fix)
        if float(hits[best].mean()) < MIN_ACCEPTED:
            raise TraceError(
                where,
                f"{step} is accepted {said['best']} of the time at best, expected"
                f" {MIN_ACCEPTED:.0%}: the dump holds other layers than this draft reads, or"
                " the draft belongs to another target",
                fix=fix,
            )
        if _standard_errors(next_best, stand) > CLEARLY:
            ids = [self._layer_ids[order.index(slot)] for slot in self._as_they_stand]
            raise TraceError(
                where,
                f"the dump holds the layers in the order {ids}: read in that order, {step}"
                f" is accepted {said['best']} of the time, in ascending order {said['stand']}",
                fix="dump the layers in ascending order, as the draft reads them",
            )
        if others and _standard_errors(stand, next_best) < CLEARLY:
            raise TraceError(
                where,
                f"the order of the layers remains unclear: {step} is accepted"
                f" {said['stand']} of the time in ascending order, and {said['next']} in"
                " another order",
                fix=fix,
            )
        return DraftFinding(
            shift=shift,
            accepted=float(stand.mean()),
            positions=len(stand),
            next_best=float(next_best.mean()),
        )

    @torch.no_grad()
    def _accepted(self, features: Tensor, token_ids: Tensor, start: int) -> Tensor:
        """[R] bool: the token that the draft proposes first, from each row, is the one recorded."""
        draft = self._draft
        predicted = draft_predictions(
            draft.forward,
            draft.forward.fuse(features[None].to(draft.weights["fc.weight"]))[0],
            token_ids,
            first_row=start - 1,
            num_draft_tokens=1,
        )[:, 0]
        return predicted == token_ids[start + 1 :][: len(predicted)]


def _standard_errors(better: Tensor, worse: Tensor) -> float:
    """By how many standard errors hits [R] are more than others at the same positions."""
    gained = better - worse
    return float(gained.sum() / gained.abs().sum().clamp(min=1).sqrt())


def _orders(num_slots: int) -> Iterator[Order]:
    stand = tuple(range(num_slots))
    yield stand
    if num_slots <= _ALL_ORDERS:
        yield from permutations(stand)
        return
    yield stand[::-1]
    for a, b in combinations(stand, 2):
        exchanged = {a: b, b: a}
        yield tuple(exchanged.get(slot, slot) for slot in stand)
