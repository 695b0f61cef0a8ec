"""What a change means against a limit, for the whole and for each category of prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..counting.acceptance_counts import pooled
from ..counting.draft_counts import PromptPair, RecordedPair, distinct_prompts
from ..counting.paired_change import PairedChange, paired_change
from .policy import Policy

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]

MIN_PROMPTS_TO_SUSPECT = 5
"""Of fewer prompts a standard error may be tiny by chance."""
MIN_PROMPTS_FOR_BOUNDS = 10
"""Pages show no bounds of a smaller category that was not judged; the JSON keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryFigures:
    """One category of prompts.

    Attributes:
        num_prompts: distinct prompts of this category, those of a cluster counted as one.
        change: None for fewer than two prompts.
        max_relative_drop: its limit.
        outcome: against that limit; None where the prompts are too few to judge the category.
        certainly_lost: of a category without an outcome: even its upper bound lies beyond the
            limit, at the confidence with which one honest draft in twenty would have such a
            category at its very limit (Bonferroni over all categories without an outcome).
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
    def bounds_are_shown(self) -> bool:
        """Whether its bounds tell a reader anything: those of a few prompts are noise."""
        is_large = self.num_prompts >= MIN_PROMPTS_FOR_BOUNDS
        return is_large or self.outcome is not None or self.certainly_lost


def outcome(change: PairedChange, max_relative_drop: float) -> Outcome:
    """PASS if the lower bound clears the limit, FAIL if the upper bound lies beyond it."""
    limit = math.log1p(-max_relative_drop)
    if change.lower > limit:
        return "PASS"
    return "FAIL" if change.upper < limit else "INCONCLUSIVE"


def change_of(prompts: Sequence[PromptPair], confidence: float) -> PairedChange | None:
    """The paired change over distinct prompts, None for fewer than two."""
    if len(prompts) < 2:
        return None
    return paired_change(
        [pair.baseline for pair in prompts],
        [pair.candidate for pair in prompts],
        confidence=confidence,
    )


def judge_categories(
    recorded: Sequence[RecordedPair], policy: Policy, confidence: float
) -> tuple[CategoryFigures, ...]:
    """Every category by name, with an outcome where it has `min_category_prompts`.

    None where all prompts are of one: that is the whole.

    Args:
        recorded: prompts with at least one round under both drafts.
        policy: limits and least numbers.
        confidence: of the bounds: the policy's, or that of a look.
    """
    by_category: dict[str, list[RecordedPair]] = {}
    for pair in recorded:
        by_category.setdefault(pair[0].category, []).append(pair)
    if len(by_category) < 2:
        return ()
    distinct = {name: distinct_prompts(by_category[name]) for name in sorted(by_category)}
    small = {name for name in distinct if len(distinct[name]) < policy.min_category_prompts}
    found = []
    for category, prompts in distinct.items():
        num_draft_tokens = prompts[0].baseline.num_draft_tokens
        baseline = pooled((pair.baseline for pair in prompts), num_draft_tokens)
        candidate = pooled((pair.candidate for pair in prompts), num_draft_tokens)
        change = change_of(prompts, confidence)
        judged = change is not None and category not in small
        found.append(
            CategoryFigures(
                category=category,
                num_prompts=len(prompts),
                baseline_mean_acceptance_length=baseline.mean_acceptance_length,
                candidate_mean_acceptance_length=candidate.mean_acceptance_length,
                change=change,
                max_relative_drop=policy.max_category_drop,
                outcome=outcome(change, policy.max_category_drop) if change and judged else None,
                certainly_lost=category in small
                and _certainly_lost(prompts, policy, 1 - (1 - confidence) / len(small)),
            )
        )
    return tuple(found)


def _certainly_lost(prompts: Sequence[PromptPair], policy: Policy, confidence: float) -> bool:
    """Whether few prompts are enough to say so; prompts all alike say nothing."""
    change = change_of(prompts, confidence) if len(prompts) >= MIN_PROMPTS_TO_SUSPECT else None
    if change is None or not change.has_spread:
        return False
    return outcome(change, policy.max_category_drop) == "FAIL"
