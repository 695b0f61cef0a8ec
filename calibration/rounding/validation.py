"""What codes give on the prompts that were held back, and which step's codes are kept by it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .settings import LearningSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One look at the prompts that were held back.

    Attributes:
        step: after which; 0 = before the first.
        rows: of each prompt, how many positions were drafted from.
        accepted: of each prompt, tokens that would have been accepted from these, added up.
        overlap: of the distributions with those of the unquantized draft, the mean over rows and
            depths of the sum of the smaller probabilities.
        unquantized: acceptance length of the unquantized draft there.
    """

    step: int
    rows: tuple[int, ...]
    accepted: tuple[int, ...]
    overlap: float
    unquantized: float

    @property
    def acceptance_length(self) -> float:
        """1 + accepted tokens, the mean over every position."""
        return 1 + sum(self.accepted) / sum(self.rows)


def best_of(validations: Sequence[Validation], settings: LearningSettings) -> Validation:
    """The look whose codes are kept: long acceptance first, then overlap.

    Only looks whose overlap is hardly below that of the first codes come into question. A few
    prompts tell acceptance lengths apart that differ by more than two standard errors of their
    difference; among those that are no shorter than the longest but for that, most overlap decides,
    which the same prompts tell much more finely.
    """
    least = validations[0].overlap - settings.max_overlap_drop
    allowed = [one for one in validations if one.overlap >= least]
    longest = max(allowed, key=lambda one: one.acceptance_length)
    alike = [one for one in allowed if not _is_shorter(one, longest)]
    return max(alike, key=lambda one: (one.overlap, one.acceptance_length))


def is_over(validations: Sequence[Validation], settings: LearningSettings) -> bool:
    """True after the last step, or where the last looks found nothing better."""
    since = len(validations) - 1 - validations.index(best_of(validations, settings))
    return validations[-1].step >= settings.steps or since >= settings.patience


def _is_shorter(one: Validation, longest: Validation) -> bool:
    """By more than two standard errors of the difference, prompt by prompt."""
    rows = sum(one.rows)
    lost = [b - a for a, b in zip(one.accepted, longest.accepted, strict=True)]
    mean = sum(lost) / rows
    residuals = (d - mean * n for d, n in zip(lost, one.rows, strict=True))
    count = len(one.rows)
    error = math.sqrt(count / max(1, count - 1) * sum(r * r for r in residuals)) / rows
    return mean > 2 * error


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningProgress:
    """Where learning stands.

    Attributes:
        step: steps done. steps: planned.
        loss: of the last step, mean divergence per row and depth in nats.
        validation: the last one. best: whose codes would be kept now.
    """

    step: int
    steps: int
    loss: float
    validation: Validation
    best: Validation
