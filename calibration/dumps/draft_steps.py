"""In which order a dump's layers stand, judged by the draft that reads them: its first step.

For targets that cannot be run here. A draft that gets the layers in another order, or those of
another token, predicts next to nothing; the next layer up or down costs it a third.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path

import torch
from torch import Tensor

from ...quantize.stored.loading import LoadedDraft
from ..errors import TraceError
from ..passes.predictions import draft_predictions
from .dump_answers import Answer

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
