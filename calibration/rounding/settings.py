"""How codes are learned, and what is reported meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CalibrationError


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """What decides the result, beside draft, recipe and traces.

    Measured on the shipped pairs: more steps gain little, and where they start hardly matters.

    Attributes:
        steps: of the optimiser, 1 or more.
        sequences: traces in each step.
        learning_rate: of the latents, in codes; Adam moves a latent by about as much in a step.
        scale_learning_rate: of the logarithms of scales.
        warmup_steps: over which both rise to that; a cosine takes them down to nothing at the end.
        depth_decay: weight of a depth over that of the depth before.
        missed_weight: of the depths behind one at which the unquantized draft is wrong: they count
            only where a chain comes that far.
        validate_every: steps between looks at the validation prompts.
        patience: such looks without a better one, after which learning stops.
        max_overlap_drop: by which the overlap with the unquantized draft's distributions may be
            below that of the first codes, in steps that are kept.
        validation_share: of the prompts, held back from learning.
        seed: of what is learned from when, and of what is held back.
    """

    steps: int = 100
    sequences: int = 4
    learning_rate: float = 0.015
    scale_learning_rate: float = 1e-3
    warmup_steps: int = 10
    depth_decay: float = 0.8
    missed_weight: float = 0.1
    validate_every: int = 10
    patience: int = 5
    max_overlap_drop: float = 0.005
    validation_share: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one = ("steps", "sequences", "validate_every", "patience")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise CalibrationError(
                    f"learned rounding: {name}",
                    f"expected at least 1, got {getattr(self, name)}",
                    fix="leave it out: the default is tried",
                )
        if not 0 < self.validation_share < 1:
            raise CalibrationError(
                "learned rounding: validation_share",
                f"expected a number between 0 and 1, got {self.validation_share}",
                fix="leave it out: the default is tried",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What codes give on the prompts that were held back.

    Attributes:
        step: after which; 0 = before the first.
        acceptance_length: 1 + accepted tokens, mean over every position of the validation prompts.
        overlap: of the distributions with those of the unquantized draft, the mean over rows and
            depths of the sum of the smaller probabilities.
        unquantized: acceptance length there of the unquantized draft.
    """

    step: int
    acceptance_length: float
    overlap: float
    unquantized: float


def best_of(validations: Sequence[Validation], settings: LearningSettings) -> Validation:
    """The longest acceptance among those whose overlap is hardly below that of the first codes.

    Of equal ones the one with more overlap, then the earlier.
    """
    least = validations[0].overlap - settings.max_overlap_drop
    allowed = [found for found in validations if found.overlap >= least]
    return max(allowed, key=lambda found: (found.acceptance_length, found.overlap))


def is_over(validations: Sequence[Validation], settings: LearningSettings) -> bool:
    """True after the last step, or where the last looks found nothing better."""
    since = len(validations) - 1 - validations.index(best_of(validations, settings))
    return validations[-1].step >= settings.steps or since >= settings.patience


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
