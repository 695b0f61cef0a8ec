"""What a change means against a limit: overall, and for each category and context bin.

Where the verify steps lie in several context bins, the bounds of all parts hold together with the
confidence of the policy (Bonferroni over the judged categories and bins). Where all lie in one bin,
only categories are judged, each at the policy's confidence: a draft that passes as a whole is so
far from their wider limit that this costs no false FAIL.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from typing_extensions import override

from ..counting.acceptance_counts import ContextBins, pooled
from ..counting.draft_counts import (
    PromptPair,
    RecordedPair,
    context_edges,
    distinct_prompts,
    in_context_bin,
    undeclared,
    ungrouped,
)
from ..counting.paired_change import PairedChange, paired_change
from .policy import Policy

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
Figures = TypeVar("Figures", bound="CategoryFigures")

MIN_PROMPTS_TO_SUSPECT = 5
"""With fewer prompts a standard error may be tiny by chance."""
MIN_PROMPTS_FOR_BOUNDS = 10
"""Pages show no bounds of a category below this that was not judged; the JSON keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryFigures:
    """One category of prompts, or the verify steps of one context bin ("context 4k-16k").

    `outcome` is None where the prompts are too few to judge it. `certainly_lost`: even its upper
    bound lies beyond the limit, at the confidence at which one honest draft in twenty would have
    a part at its very limit; or it fails without declared clusters.
    """

    category: str
    num_prompts: int
    baseline_mean_acceptance_length: float
    candidate_mean_acceptance_length: float
    change: PairedChange | None
    max_relative_drop: float
    outcome: Outcome | None
    certainly_lost: bool = False

    @property
    def is_context_bin(self) -> bool:
        """Whether it is a context bin rather than a category."""
        return False

    @property
    def bounds_are_shown(self) -> bool:
        """Whether its bounds tell a reader anything: those of a few prompts are noise."""
        is_large = self.num_prompts >= MIN_PROMPTS_FOR_BOUNDS
        return is_large or self.outcome is not None or self.certainly_lost


class ContextBinFigures(CategoryFigures):
    """The verify steps of one context bin, named as in "context 4k-16k"."""

    __slots__ = ()

    @property
    @override
    def is_context_bin(self) -> bool:
        return True


def outcome(change: PairedChange, max_relative_drop: float) -> Outcome:
    """PASS if the lower bound clears the limit, FAIL if the upper bound lies beyond it."""
    limit = math.log1p(-max_relative_drop)
    if change.lower > limit:
        return "PASS"
    return "FAIL" if change.upper < limit else "INCONCLUSIVE"


def widest_change(recorded: Sequence[RecordedPair], confidence: float) -> PairedChange | None:
    """The paired change over clusters, with the widest bounds of three ways to count prompts.

    In clusters, in those that texts show, and each alone: so clusters that were chosen by the
    counts narrow no bound.
    """
    change = change_of(distinct_prompts(recorded), confidence)
    for other in (undeclared(recorded), ungrouped(recorded)):
        alone = change_of(distinct_prompts(other), confidence)
        change = change.widened(alone) if change and alone else change
    return change


def change_of(prompts: Sequence[PromptPair], confidence: float) -> PairedChange | None:
    """The paired change over distinct prompts, None for fewer than two."""
    if len(prompts) < 2:
        return None
    return paired_change(
        [pair.baseline for pair in prompts],
        [pair.candidate for pair in prompts],
        confidence=confidence,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is judged besides the whole; empty where all is in one category, or one context bin."""

    categories: tuple[CategoryFigures, ...] = ()
    context_bins: tuple[ContextBinFigures, ...] = ()

    @property
    def bounds_hold_together(self) -> bool:
        """Whether all of their bounds hold together; else each holds alone."""
        return bool(self.context_bins)

    @property
    def all(self) -> tuple[CategoryFigures, ...]:
        """Categories, then context bins."""
        return (*self.categories, *self.context_bins)

    def with_outcome(self, outcome: Outcome) -> list[CategoryFigures]:
        """The parts with this outcome."""
        return [part for part in self.all if part.outcome == outcome]


def judge_parts(recorded: Sequence[RecordedPair], policy: Policy, confidence: float) -> Parts:
    """Every category and context bin, with an outcome where it has `min_category_prompts`.

    Most prompts that only just reach a bin have few steps there, so prompts count there by
    their effective sample size. Declared clusters make no part look better.
    """
    categories, bins = _by_category(recorded), _by_context_bin(recorded)
    least = policy.min_category_prompts
    judged = [name for name, prompts in categories.items() if len(prompts) >= least]
    for name, prompts in bins.items():
        change = change_of(prompts, confidence)
        if change is not None and change.effective_num_prompts >= least:
            judged.append(name)
    alone = len(categories) + len(bins) - len(judged)
    of_each = 1 - (1 - confidence) / max(1, len(judged)) if bins else confidence
    of_small = 1 - (1 - confidence) / max(1, alone)

    def figures(
        of: type[Figures], parts: Mapping[str, Sequence[PromptPair]], alone: Sequence[Figures]
    ) -> Iterator[Figures]:
        for place, (name, prompts) in enumerate(parts.items()):
            figures = _figures(of, name, prompts, policy, of_each)
            if name not in judged:
                lost = _certainly_lost(prompts, policy, of_small)
                figures = dataclasses.replace(figures, outcome=None, certainly_lost=lost)
            yield _not_better(figures, alone[place]) if alone else figures

    texts_alone = undeclared(recorded)
    others = judge_parts(texts_alone, policy, confidence) if texts_alone else Parts()
    return Parts(
        categories=tuple(figures(CategoryFigures, categories, others.categories)),
        context_bins=tuple(figures(ContextBinFigures, bins, others.context_bins)),
    )


def _not_better(part: Figures, alone: Figures) -> Figures:
    both = part.change and alone.change and part.change.widened(alone.change)
    change = both or part.change or alone.change
    result = outcome(change, part.max_relative_drop) if part.outcome and change else part.outcome
    lost = part.certainly_lost or alone.certainly_lost or alone.outcome == "FAIL" != result
    return dataclasses.replace(part, change=change, outcome=result, certainly_lost=lost)


def _by_category(recorded: Sequence[RecordedPair]) -> dict[str, tuple[PromptPair, ...]]:
    by_category: dict[str, list[RecordedPair]] = {}
    for pair in recorded:
        by_category.setdefault(pair[0].category, []).append(pair)
    if len(by_category) < 2:
        return {}
    return {name: distinct_prompts(by_category[name]) for name in sorted(by_category)}


def _by_context_bin(recorded: Sequence[RecordedPair]) -> dict[str, tuple[PromptPair, ...]]:
    bins = ContextBins(edges=context_edges(baseline for baseline, _ in recorded))
    by_bin = {
        f"context {label}": distinct_prompts(in_context_bin(recorded, number))
        for number, label in enumerate(bins.labels)
    }
    by_bin = {name: prompts for name, prompts in by_bin.items() if prompts}
    return by_bin if len(by_bin) > 1 else {}


def _figures(
    of: type[Figures], name: str, prompts: Sequence[PromptPair], policy: Policy, confidence: float
) -> Figures:
    k, change = prompts[0].baseline.num_draft_tokens, change_of(prompts, confidence)
    baseline = pooled((pair.baseline for pair in prompts), k)
    candidate = pooled((pair.candidate for pair in prompts), k)
    return of(
        category=name,
        num_prompts=len(prompts),
        baseline_mean_acceptance_length=baseline.mean_acceptance_length,
        candidate_mean_acceptance_length=candidate.mean_acceptance_length,
        change=change,
        max_relative_drop=policy.max_category_drop,
        outcome=outcome(change, policy.max_category_drop) if change else None,
    )


def _certainly_lost(prompts: Sequence[PromptPair], policy: Policy, confidence: float) -> bool:
    """Whether even few prompts show a loss; prompts that are all alike show nothing."""
    change = change_of(prompts, confidence) if len(prompts) >= MIN_PROMPTS_TO_SUSPECT else None
    if change is None or not change.has_spread:
        return False
    return outcome(change, policy.max_category_drop) == "FAIL"
