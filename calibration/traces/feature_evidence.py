"""Do the recorded features belong to the tokens that they stand beside? The traces themselves say.

A residual stream knows its token: where a token occurs again, its features are alike. So the share
of the features' variance that the token explains (adjusted R squared of a one-way layout, 0 where
token and feature have nothing to do with each other) is large at the token's own position, smaller
one position off, and nothing for the features of another prompt. On the shipped targets it is 0.94,
0.88 and 0.84 for the outputs of layers 0 to 2, at most 0.57 one position off.

No head, no target and no draft are needed. What it cannot see is another target's features of the
same text: that shows in the acceptance of the baseline.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantize.files.mapped_rows import row_blocks
from .prompt_trace import PromptTrace

SHIFTS = (-2, -1, 0, 1, 2)
MIN_SHARE = 0.05
MIN_REPEATS = 500

_ELEMENTS = 64  # of a feature: evenly spaced ones, so that a vocabulary of sums stays small


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureEvidence:
    """What the traces say of their own features.

    Attributes:
        repeats: positions whose token occurs elsewhere too, less one for each such token.
        constant: all features are equal.
        share: shift s -> share of the variance of the features at position i that the token at
            i + s explains, adjusted, at most 1, about 0 by chance.
    """

    repeats: int
    constant: bool
    share: Mapping[int, float]

    @property
    def checked(self) -> bool:
        """True if there are enough repeats to say anything."""
        return self.constant or self.repeats >= MIN_REPEATS

    def problem(self) -> str:
        """What no traces say, of figures that were read; empty for what they may say."""
        if self.checked and not self.constant and 0 not in self.share:
            return "share: expected that of the token's own position, 0"
        return ""

    def fault(self) -> str | None:
        """What is wrong with the features, or None."""
        if self.constant:
            return "the recorded features are all equal"
        if not self.checked:
            return None
        best = max(self.share, key=lambda shift: self.share[shift])
        own = self.share[0]
        if self.share[best] < MIN_SHARE:
            return (
                "the recorded features do not belong to the tokens beside them (a token"
                f" explains {own:.0%} of their variance): they come from another text"
            )
        if best != 0:
            return (
                f"the recorded features are shifted by {best:+d} against their tokens (the token"
                f" there explains {self.share[best]:.1%} of their variance, the one beside them"
                f" {own:.1%})"
            )
        return None


def feature_evidence(traces: Iterable[PromptTrace]) -> FeatureEvidence:
    """Of all these traces."""
    tally = FeatureTally()
    for trace in traces:
        tally.add(trace)
    return tally.evidence()


class FeatureTally:
    """Sums over the traces that go by; `evidence` says what they come to."""

    def __init__(self) -> None:
        self._sums = {shift: _TokenSums() for shift in SHIFTS}
        self._first: Tensor | None = None
        self._constant = True

    def add(self, trace: PromptTrace) -> None:
        """Take in one prompt."""
        first, some = trace.features[0].clone(), []
        for block in row_blocks(trace.features):
            some.append(_some_elements(block))
            self._constant = self._constant and bool((block == first).all())
        features = torch.cat(some)
        if self._first is None:
            self._first = features[0]
        self._constant = self._constant and torch.equal(features[0], self._first)
        reach = SHIFTS[-1]
        inside = torch.arange(reach, max(reach, features.shape[0] - reach))
        for shift, sums in self._sums.items():
            for rows in row_blocks(inside):
                sums.add(trace.token_ids[rows + shift], features[rows])

    def evidence(self) -> FeatureEvidence:
        """Of all that was added."""
        return FeatureEvidence(
            repeats=self._sums[0].repeats,
            constant=self._constant,
            share={shift: sums.share() for shift, sums in self._sums.items()},
        )


class _TokenSums:
    """Per token: how often, sum and sum of squares of the features beside it, float64."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._count = torch.zeros(0, dtype=torch.float64)
        self._sum = torch.zeros(0, 0, dtype=torch.float64)
        self._square = torch.zeros(0, 0, dtype=torch.float64)

    def add(self, token_ids: Tensor, features: Tensor) -> None:
        rows = torch.tensor([self._rows.setdefault(t, len(self._rows)) for t in token_ids.tolist()])
        if not len(rows):
            return
        self._grow(len(self._rows), features.shape[1])
        self._count.index_add_(0, rows, torch.ones(len(rows), dtype=torch.float64))
        self._sum.index_add_(0, rows, features)
        self._square.index_add_(0, rows, features**2)

    @property
    def repeats(self) -> int:
        often = self._count[self._count > 1]
        return int(often.sum()) - len(often)

    def share(self) -> float:
        """Adjusted R squared, averaged over the elements that vary; 0 where nothing repeats."""
        often = self._count > 1
        if self.repeats < 1:
            return 0.0
        count, total_count = self._count[often, None], float(self._count[often].sum())
        mean = self._sum[often].sum(0) / total_count
        total = self._square[often].sum(0) - total_count * mean**2
        between = (self._sum[often] ** 2 / count).sum(0) - total_count * mean**2
        varying = total > 1e-9 * self._square[often].sum(0)
        if not bool(varying.any()):
            return 0.0
        unexplained = (1 - between / total)[varying].mean()
        return float(1 - unexplained * (total_count - 1) / self.repeats)

    def _grow(self, rows: int, width: int) -> None:
        held = self._count.shape[0]
        if rows > held:  # by half as much again, so that growing stays linear
            more = max(rows - held, held // 2)
            zeros = torch.zeros(more, width, dtype=torch.float64)
            self._count = torch.cat([self._count, zeros[:, 0]])
            self._sum = torch.cat([self._sum.reshape(held, width), zeros])
            self._square = torch.cat([self._square.reshape(held, width), zeros])


def _some_elements(features: Tensor) -> Tensor:
    """[N - 1, at most 64] float64."""
    width = features.shape[1]
    columns = torch.arange(0, width, max(1, width // _ELEMENTS))[:_ELEMENTS]
    return features[:, columns].double()
