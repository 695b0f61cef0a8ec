"""How drafts compare in each scope: over all prompts, for a traffic, in every category.

Where drafts are so many that the changes of all pairs would fill memory and report, those are
reckoned that tell something: from the first draft, and between each draft and the best. Which draft
is best is not known before, so that the intervals of all pairs still have to hold together.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .prompt_samples import Sample
from .simultaneous import bonferroni, simultaneous

_METHOD = "max-t over all pairs and categories, prompts as units, jackknife"
_METHOD_OF_MANY = "Bonferroni over all pairs and categories, prompts as units, jackknife"
Pair = tuple[int, int]
"""Numbers of two drafts, the smaller one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From one draft to another, relative: candidate / baseline - 1 of the acceptance lengths.

    Attributes:
        lower, upper: simultaneous bounds.
    """

    baseline: str
    candidate: str
    relative_change: float
    lower: float
    upper: float

    @property
    def is_separable(self) -> bool:
        """Whether zero lies outside."""
        return self.lower > 0 or self.upper < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """All prompts, the traffic that was asked about, or one category.

    Attributes:
        is_whole: it is no category.
        lengths: acceptance length of every draft.
        changes: of every pair in the order of the drafts, or of those pairs that the first or the
            best is in (`scopes_of`); none where the prompts are too few.
        best: the draft with the longest, and `alike` those that are not separable from it; None
            where the prompts are too few.
    """

    name: str
    is_whole: bool
    num_prompts: int
    lengths: tuple[float, ...]
    changes: tuple[Change, ...]
    best: str | None
    alike: tuple[str, ...]

    @property
    def ranked(self) -> list[int]:
        """Numbers of the drafts: the first, then the others, the longest acceptance first."""
        return [0, *sorted(range(1, len(self.lengths)), key=lambda i: (-self.lengths[i], i))]

    def against_first(self, names: Sequence[str]) -> tuple[Change | None, ...]:
        """The change of every draft but the first against it."""
        first, *others = names
        found = {(one.baseline, one.candidate): one for one in self.changes}
        return tuple(found.get((first, other)) for other in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """All scopes, with intervals that hold together.

    Attributes:
        method: how the intervals were computed, in words.
        each: the confidence of one interval alone. bonferroni_of_each: without correlations.
    """

    scopes: tuple[Scope, ...]
    method: str
    each: float
    bonferroni_of_each: float


def scopes_of(
    samples: Sequence[Sample], names: Sequence[str], confidence: float, *, every_pair: bool
) -> Scopes:
    """The changes of every scope.

    Args:
        names: of the drafts, the baseline first.
        confidence: of all intervals together, in (0, 1).
        every_pair: give the changes of every pair; else of those with the first or the best draft.
    """
    compared = {
        place: _pairs(sample, every_pair=every_pair)
        for place, sample in enumerate(samples)
        if sample.is_compared
    }
    estimates = {
        (place, pair): samples[place].change(*pair)
        for place, pairs in compared.items()
        for pair in pairs
    }
    all_pairs = 0 if every_pair else math.comb(len(names), 2) * len(compared)
    found = simultaneous(list(estimates.values()), confidence, at_least=all_pairs)
    bounds = dict(zip(estimates, found.bounds, strict=True))
    scopes = []
    for place, sample in enumerate(samples):
        changes = tuple(
            Change(
                baseline=names[one],
                candidate=names[other],
                relative_change=math.expm1(estimates[place, (one, other)].value),
                lower=_expm1(bounds[place, (one, other)][0]),
                upper=_expm1(bounds[place, (one, other)][1]),
            )
            for one, other in compared.get(place, ())
        )
        scopes.append(_scope(sample, names, changes))
    number = sum(estimate.has_spread for estimate in estimates.values())
    return Scopes(
        scopes=tuple(scopes),
        method=_METHOD if found.by_correlation else _METHOD_OF_MANY,
        each=found.each,
        bonferroni_of_each=bonferroni(max(1, number, all_pairs), confidence),
    )


def _pairs(sample: Sample, *, every_pair: bool) -> list[Pair]:
    drafts = range(len(sample.log_lengths))
    if every_pair:
        return list(itertools.combinations(drafts, 2))
    best = int(np.argmax(sample.log_lengths))
    told = {(min(one, each), max(one, each)) for one in (0, best) for each in drafts if each != one}
    return sorted(told)


def _scope(sample: Sample, names: Sequence[str], changes: tuple[Change, ...]) -> Scope:
    lengths = tuple(map(float, np.exp(sample.log_lengths)))
    best: str | None = None
    alike: tuple[str, ...] = ()
    if changes:
        best = names[int(np.argmax(sample.log_lengths))]
        alike = tuple(
            ({one.baseline, one.candidate} - {best}).pop()
            for one in changes
            if best in (one.baseline, one.candidate) and not one.is_separable
        )
    return Scope(
        name=sample.name,
        is_whole=sample.is_whole,
        num_prompts=sample.num_prompts,
        lengths=lengths,
        changes=changes,
        best=best,
        alike=alike,
    )


def _expm1(log_ratio: float) -> float:
    """Relative, finite also where a bound of few prompts is beyond all bounds."""
    return math.expm1(min(log_ratio, 20.0))
