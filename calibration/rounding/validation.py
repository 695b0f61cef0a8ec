"""What codes give on the prompts that were held back, and which step's codes are kept by it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .learning_settings import LearningSettings


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
    """The look whose codes are kept: each one in turn against the best before it.

    So the best is the last one or the one that was best before, whose codes are there. Looks whose
    overlap is clearly below that of the first codes do not come into question. Acceptance lengths
    decide where they differ by more than two standard errors, else overlap, which so few prompts
    tell much more finely.
    """
    least = validations[0].overlap - settings.max_overlap_drop
    best = validations[0]
    for one in validations[1:]:
        if one.overlap >= least and _is_better(one, best):
            best = one
    return best


def is_over(validations: Sequence[Validation], settings: LearningSettings) -> bool:
    """True after the last step, or where the last looks found nothing better."""
    since = len(validations) - 1 - validations.index(best_of(validations, settings))
    return validations[-1].step >= settings.steps or since >= settings.patience


def _is_better(one: Validation, best: Validation) -> bool:
    gain, error = _gain(one, best)
    if abs(gain) > 2 * error:
        return gain > 0
    return (one.overlap, gain) > (best.overlap, 0)


def _gain(one: Validation, other: Validation) -> tuple[float, float]:
    """In acceptance length, and the standard error of that, prompt by prompt."""
    rows, count = sum(one.rows), len(one.rows)
    gains = [a - b for a, b in zip(one.accepted, other.accepted, strict=True)]
    mean = sum(gains) / rows
    residuals = (gain - mean * n for gain, n in zip(gains, one.rows, strict=True))
    error = math.sqrt(count / max(1, count - 1) * sum(r * r for r in residuals)) / rows
    return mean, error


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
