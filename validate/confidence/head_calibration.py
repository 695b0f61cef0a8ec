"""Figures of confidence heads, as reports have them: no arithmetic, and nothing heavy to import."""

from dataclasses import dataclass

NUM_BINS = 15
"""Of survivals, as SGLang has it."""
BOUNDS = 0.95
"""Confidence of each bound, where no policy says another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedFigure:
    """A figure, and one-sided bounds; equal to it where a single cluster shows no spread."""

    estimate: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCalibration:
    """Of one draft's confidence head.

    Attributes:
        calibration_error: the expected one of the survival, mean over the positions, in [0, 1].
        brier_score: of the survival, mean over the positions, in [0, 1].
        by_position: [K] the expected calibration error of each position.
    """

    calibration_error: BoundedFigure
    brier_score: BoundedFigure
    by_position: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationChange:
    """The candidate's confidence head against the baseline's.

    Attributes:
        calibration_error_change, brier_score_change: candidate less baseline, with paired bounds.
        confidence: of each bound. num_clusters: of prompts. num_bins: of survivals.
        temperatures: of the candidate, from an STS file; None = none were given.
    """

    baseline: HeadCalibration
    candidate: HeadCalibration
    calibration_error_change: BoundedFigure
    brier_score_change: BoundedFigure
    confidence: float
    num_clusters: int
    num_bins: int = NUM_BINS
    temperatures: tuple[float, ...] | None = None

    @property
    def is_worse(self) -> bool:
        """The candidate's error is larger than the baseline's, beyond what prompts do by chance."""
        return self.calibration_error_change.lower > 0
