"""In which order a dump's layers stand, judged by the draft that reads them: its first step.

For targets that cannot be run here. A draft that gets the layers in another order, or those of
another token, predicts next to nothing; the next layer up or down costs it a third.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from math import sqrt
from pathlib import Path

import torch

from ...quantize.stored.loading import LoadedDraft
from ..errors import TraceError
from ..predictions import draft_predictions
from .answers import Answer

MIN_ACCEPTED = 0.55
"""Published drafts accept 0.7 and more; with layers one off 0.50 was seen."""
MIN_POSITIONS = 200
_ALL_ORDERS = 4  # slots; of more, exchanges of two and the reverse are tried
_STANDARD_ERRORS = 3

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
        draft: that reads these features.
        layer_ids: that it reads, ascending; the dump has as many.
    """

    def __init__(self, draft: LoadedDraft, layer_ids: tuple[int, ...]) -> None:
        self._draft = draft
        self._layer_ids = layer_ids
        self._as_they_stand = tuple(range(len(layer_ids)))
        self._orders = tuple(dict.fromkeys(_orders(len(layer_ids))))
        self._hits: Counter[tuple[Order, int]] = Counter()
        self._positions = 0

    def add(self, answer: Answer) -> None:
        """Take in one answer."""
        token_ids = answer.sample.token_ids[: answer.stop]
        slots = answer.sample.aux.unflatten(1, (len(self._as_they_stand), -1))
        for shift in (0, -1):
            features = slots[-shift : -shift + len(token_ids) - 1]
            cut = token_ids[: len(features) + 1]
            for order in self._orders:
                self._hits[order, shift] += self._count(features[:, order].flatten(1), cut, answer)
        self._positions += answer.stop - answer.start - 1

    def finding(self, where: Path) -> DraftFinding:
        """What all answers come to.

        Raises:
            TraceError: too few positions, another order is better, or the draft accepts little.
        """
        if self._positions < MIN_POSITIONS:
            raise TraceError(
                where,
                f"{self._positions} positions of answers are too few to settle the order of layers"
                f" by the draft, expected {MIN_POSITIONS}",
                fix="give the target's whole folder, so that positions can be recomputed",
            )
        share = {found: hits / self._positions for found, hits in self._hits.items()}
        best = max(share, key=lambda found: share[found])
        shift = best[1]
        others = [share[o, shift] for o in self._orders if o != self._as_they_stand]
        stands, next_best = share[self._as_they_stand, shift], max(others, default=0.0)
        error = sqrt(max(share[best] * (1 - share[best]), 0.01) / self._positions)
        if share[best] < MIN_ACCEPTED:
            raise TraceError(
                where,
                f"the first step of {self._draft.name} is accepted {share[best]:.0%} of the time at"
                f" best, expected {MIN_ACCEPTED:.0%}: other layers, or a draft of another target",
                fix="give the target's whole folder, so that positions can be recomputed",
            )
        if stands < next_best - _STANDARD_ERRORS * error:
            order = [self._layer_ids[best[0].index(slot)] for slot in self._as_they_stand]
            raise TraceError(
                where,
                f"layers stand in the order {order}: read so, the first step of"
                f" {self._draft.name} is accepted {share[best]:.0%} of the time, as they stand"
                f" {stands:.0%}",
                fix="dump the layers in ascending order, as the draft reads them",
            )
        if stands < next_best + _STANDARD_ERRORS * error:
            raise TraceError(
                where,
                f"the order of the layers cannot be settled: the first step of {self._draft.name}"
                f" is accepted {stands:.0%} as they stand and {next_best:.0%} in another order",
                fix="give the target's whole folder, so that positions can be recomputed",
            )
        return DraftFinding(
            shift=shift, accepted=stands, positions=self._positions, next_best=next_best
        )

    @torch.no_grad()
    def _count(self, features: torch.Tensor, token_ids: torch.Tensor, answer: Answer) -> int:
        draft = self._draft
        predicted = draft_predictions(
            draft.forward,
            draft.forward.fuse(features[None].to(draft.weights["fc.weight"]))[0],
            token_ids,
            first_row=answer.start - 1,
            num_draft_tokens=1,
        )[:, 0]
        recorded = token_ids[answer.start + 1 :][: len(predicted)]
        return int((predicted == recorded).sum())


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

