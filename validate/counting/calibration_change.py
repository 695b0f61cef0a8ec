"""How well two drafts' confidence heads foretell acceptance, compared on the same prompts.

Clusters of prompts are what is sampled, as for acceptance. The bounds are those of the jackknife
with the t quantile of the effective sample size, the clusters weighing as many verify steps as they
have; of both drafts together, where the change is bounded. The expected calibration error sums
absolute values, so that it is a little too high on few prompts: for both drafts alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..confidence.calibration_error import (
    Floats,
    SurvivalCounts,
    brier_scores,
    calibration_errors,
)
from ..confidence.head_calibration import BoundedFigure, CalibrationChange, HeadCalibration
from .draft_replay import PromptReplay
from .jackknife import effective_sample_size, pseudo_values, sums_without, t_quantile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Figures:
    """Of all clusters, [1], and of all but each one, [N]; weighing [N] steps."""

    errors: tuple[Floats, Floats]
    scores: tuple[Floats, Floats]
    weights: Floats
    by_position: Floats


def head_calibration(prompts: Sequence[PromptReplay], confidence: float) -> HeadCalibration:
    """Of one draft.

    Args:
        prompts: replayed with `ConfidenceQuestion`, one at least with a verify step.
        confidence: of each bound, in (0.5, 1).
    """
    return _calibration(_figures(prompts), confidence)


def calibration_change(
    baseline: Sequence[PromptReplay],
    candidate: Sequence[PromptReplay],
    confidence: float,
    *,
    temperatures: tuple[float, ...] | None = None,
) -> CalibrationChange:
    """Of two drafts on the same prompts; arguments as of `head_calibration`."""
    before, after = _figures(baseline), _figures(candidate)
    weights = before.weights + after.weights
    errors, scores = (
        _bounded(b[0] - a[0], b[1] - a[1], weights, confidence)
        for a, b in ((before.errors, after.errors), (before.scores, after.scores))
    )
    return CalibrationChange(
        baseline=_calibration(before, confidence),
        candidate=_calibration(after, confidence),
        calibration_error_change=errors,
        brier_score_change=scores,
        confidence=confidence,
        num_clusters=len(weights),
        temperatures=temperatures,
    )


def _calibration(found: _Figures, confidence: float) -> HeadCalibration:
    return HeadCalibration(
        calibration_error=_bounded(*found.errors, found.weights, confidence),
        brier_score=_bounded(*found.scores, found.weights, confidence),
        by_position=tuple(found.by_position.tolist()),
    )


def _figures(prompts: Sequence[PromptReplay]) -> _Figures:
    clusters: dict[str, list[SurvivalCounts]] = {}
    for prompt in prompts:
        if prompt.counts.num_steps:
            assert prompt.survival is not None  # the replay was asked
            clusters.setdefault(prompt.counted_with, []).append(prompt.survival)
    bins = np.stack([sum((one.bins for one in own), np.zeros(1)) for own in clusters.values()])
    squares = np.stack([sum((o.squares for o in own), np.zeros(1)) for own in clusters.values()])
    whole = bins.sum(0), squares.sum(0)
    without = (np.moveaxis(sums_without(np.moveaxis(one, 0, -1)), -1, 0) for one in (bins, squares))
    bins_without, squares_without = without
    by_position = calibration_errors(whole[0])
    return _Figures(
        errors=(by_position.mean(keepdims=True), calibration_errors(bins_without).mean(-1)),
        scores=(
            brier_scores(*whole).mean(keepdims=True),
            brier_scores(bins_without, squares_without).mean(-1),
        ),
        weights=bins[:, SurvivalCounts.STEPS, 0].sum(-1),
        by_position=by_position,
    )


def _bounded(whole: Floats, without: Floats, weights: Floats, confidence: float) -> BoundedFigure:
    estimate, error = float(whole[0]), 0.0
    if len(weights) > 1:
        spread = float(pseudo_values(whole, without).std(ddof=1))
        quantile = float(t_quantile(confidence, effective_sample_size(weights) - 1))
        error = quantile * spread / math.sqrt(len(weights))
    return BoundedFigure(estimate=estimate, lower=estimate - error, upper=estimate + error)
