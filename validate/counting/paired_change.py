"""Two drafts on the same prompts: how acceptance changed, its bounds, and the prompts needed.

Bounds come from the jackknife, which leaves each prompt out in turn. With theta over all N prompts,
and theta_-i over all except prompt i:

    psi_i = N theta - (N - 1) theta_-i,         SE(theta) = sd(psi) / sqrt(N)
    c_i = sqrt((N - 1) / N) (theta_-i - mean),  SE(theta)^2 = sum c_i^2

These are one error in two forms: pseudo-values have a spread and a skewness, contributions of
several estimates on the same prompts have correlations. No random number is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from ...recipes.brief import apart
from .acceptance_counts import AcceptanceCounts

Floats = NDArray[np.float64]

NO_SPREAD = 1e-12
"""A standard error of zero after rounding."""


def sums_without(values: Floats) -> Floats:
    """[..., N] the sums of all values except each one in turn."""
    return np.asarray(values.sum(-1, keepdims=True) - values)


def pseudo_values(whole: Floats, without: Floats) -> Floats:
    """The psi of [..., 1] theta and [..., N] theta_-i: their mean is the estimate less its bias."""
    count = without.shape[-1]
    return np.asarray(count * whole - (count - 1) * without)


def contributions(without: Floats) -> Floats:
    """The c of [..., N] theta_-i."""
    count = without.shape[-1]
    centred = without - without.mean(axis=-1, keepdims=True)
    return np.asarray(math.sqrt((count - 1) / count) * centred)


def effective_sample_size(weights: Floats) -> Floats:
    """How many items of equal weight hold the same information: in [1, N] for [..., N] weights."""
    return np.asarray(weights.sum(-1) ** 2 / (weights**2).sum(-1))


def t_quantile(confidence: float, degrees_of_freedom: Floats | float) -> Floats:
    """Quantile of Student's t, with at least one degree of freedom."""
    return np.asarray(stats.t.ppf(confidence, np.maximum(1.0, degrees_of_freedom)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A figure with one-sided bounds, each at `confidence`; for one cluster the figure itself."""

    estimate: float
    lower: float
    upper: float
    confidence: float
    num_clusters: int

    @property
    def has_spread(self) -> bool:
        """Whether bounds are known."""
        return self.num_clusters > 1


def pooled_mean(sums: ArrayLike, counts: ArrayLike, *, confidence: float) -> Bounded:
    """Sum of sums over sum of counts, with its bounds; clusters of prompts are the sampled units.

    With m = sum s / sum n the bounds are m -+ t_{confidence, df} SE, where df = max(1, (sum n)^2 /
    sum n^2 - 1). With equal counts this is the mean of the clusters' means with its t bounds.
    `sums` and `counts` are [N], counts above 0 (else ValueError); `confidence` is in (0.5, 1).
    """
    s, n = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if not len(s) or s.shape != n.shape or n.min() <= 0:
        raise ValueError(f"expected sums over counts above 0, got {s.shape} over {n.shape}")
    mean, count = s.sum() / n.sum(), len(s)
    error = 0.0
    if count > 1:
        spread = pseudo_values(mean, sums_without(s) / sums_without(n)).std(ddof=1)
        quantile = t_quantile(confidence, effective_sample_size(n) - 1)
        error = float(quantile) * float(spread) / math.sqrt(count)
    return Bounded(
        estimate=float(mean),
        lower=float(mean) - error,
        upper=float(mean) + error,
        confidence=confidence,
        num_clusters=count,
    )


LIKELY = 0.8
"""One-sided confidence of the range of changes that `RequiredPrompts` covers."""

_SKEWNESS_SEEN = 2.0
"""The skewness to assume, by that of a sample, which is too small where the loss is rare.
Chosen by simulation: 1 leaves 7 to 9 % false passes of 5 at 60 prompts, 3 costs more power.
"""


def relative(log_ratio: float) -> float:
    """A change as a share, finite even where a bound of few prompts is astronomically large."""
    return math.expm1(min(log_ratio, 20.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedChange:
    """Relative change of the mean acceptance length from a baseline to a candidate draft.

    `log_ratio` is theta = log(AL_candidate / AL_baseline), `lower` and `upper` its one-sided
    bounds; `standard_deviation` and `skewness` are of the pseudo-values.
    """

    log_ratio: float
    standard_deviation: float
    standard_error: float
    lower: float
    upper: float
    confidence: float
    num_prompts: int
    effective_num_prompts: float
    skewness: float

    @property
    def relative_change(self) -> float:
        """AL_candidate / AL_baseline - 1."""
        return relative(self.log_ratio)

    @property
    def relative_bounds(self) -> tuple[float, float]:
        """Both bounds as shares."""
        return relative(self.lower), relative(self.upper)

    def in_percent(self, max_drop: float | None = None) -> tuple[str, str, str]:
        """The change and both bounds, told from the limit of a drop."""
        limit = None if max_drop is None else -max_drop
        change, lower, upper = (
            apart(share, limit, "+.2%") for share in (self.relative_change, *self.relative_bounds)
        )
        return change, lower, upper

    def num_prompts_for(self, effective: int) -> int:
        """The number of prompts like these with this effective sample size."""
        return math.ceil(effective * self.num_prompts / self.effective_num_prompts)

    def widened(self, other: "PairedChange") -> "PairedChange":
        """With the wider of each bound, so that declared clusters never narrow one."""
        error = max(self.standard_error, other.standard_error)
        return replace(
            self,
            standard_deviation=error * math.sqrt(self.num_prompts),
            standard_error=error,
            lower=min(self.lower, other.lower),
            upper=max(self.upper, other.upper),
            confidence=max(self.confidence, other.confidence),
        )

    def excludes(self, other: "PairedChange") -> bool:
        """Whether the estimate of another change lies beyond one of the bounds."""
        return not self.lower <= other.log_ratio <= self.upper

    @property
    def has_spread(self) -> bool:
        """Whether the change differs between prompts at all."""
        return self.standard_error > NO_SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredPrompts:
    """How many prompts a draft needs to pass with the policy's power; None = no number is enough.

    `fewest` and `most` are for the ends of the likely range (80 % and 20 % points of the change).
    """

    fewest: int | None
    as_measured: int | None
    most: int | None
    if_unchanged: int


def paired_change(
    baseline: Sequence[AcceptanceCounts],
    candidate: Sequence[AcceptanceCounts],
    *,
    confidence: float,
) -> PairedChange:
    """Compare two drafts on the same prompts; counts are in one order, and each has steps.

    With T emitted tokens and R steps per prompt, AL = sum T / sum R of each draft and theta =
    log(AL_q / AL_b):

        bounds = theta -+ q * SE, q = the larger of t_{confidence, df} and Hall's transformation,
        df = max(1, N_eff - 1),   N_eff = (sum R_b)^2 / sum R_b^2.

    The weight of a prompt is the baseline's steps, which do not depend on the judged draft.
    Where few long prompts hold most steps, the linearised error with N - 1 degrees of freedom
    covers 90 % instead of 95 %. Where a few prompts hold the loss, a sample with too few of them
    shows too small a loss and too small an error at once; the transformation widens the bound on
    that side (experiments/error_rates.md). ValueError: fewer than two prompts, unequal numbers, or
    one without steps.
    """
    count = len(baseline)
    if count < 2 or count != len(candidate):
        raise ValueError(f"expected two or more pairs, got {count} and {len(candidate)}")
    tokens_b, steps_b = _tokens_and_steps(baseline)
    tokens_q, steps_q = _tokens_and_steps(candidate)
    if min(steps_b.min(), steps_q.min()) <= 0:
        raise ValueError("expected verify steps in every prompt")
    return change_of_sums(tokens_b, steps_b, tokens_q, steps_q, confidence=confidence)


def change_of_sums(
    tokens_b: Floats, steps_b: Floats, tokens_q: Floats, steps_q: Floats, *, confidence: float
) -> PairedChange:
    """The arithmetic of `paired_change`: [N] tokens and steps of N prompts."""
    columns = (tokens_q, steps_q, tokens_b, steps_b)
    theta = _log_ratio(*(column.sum(keepdims=True) for column in columns))
    psi = pseudo_values(theta, _log_ratio(*map(sums_without, columns)))
    count, log_ratio = len(psi), float(theta[0])
    deviation = float(psi.std(ddof=1))
    error = deviation / math.sqrt(count)
    skewness = _skewness(psi) if error > NO_SPREAD else 0.0
    effective = effective_sample_size(steps_b)
    quantile = float(t_quantile(confidence, effective - 1))
    tilt = _SKEWNESS_SEEN * skewness / math.sqrt(count)
    return PairedChange(
        log_ratio=log_ratio,
        standard_deviation=deviation,
        standard_error=error,
        lower=log_ratio - max(quantile, _skewed(quantile, tilt)) * error,
        upper=log_ratio + max(quantile, _skewed(quantile, -tilt)) * error,
        confidence=confidence,
        num_prompts=count,
        effective_num_prompts=float(effective),
        skewness=skewness,
    )


def required_prompts(
    change: PairedChange, *, max_relative_drop: float, power: float, min_prompts: int
) -> RequiredPrompts:
    """The number of prompts with which a draft like this passes with probability `power`.

    N = ((z_confidence + z_power) * sd / (theta - log(1 - max_relative_drop)))^2, rounded up, and at
    an effective sample of at least `min_prompts`. N is a range because theta is.
    """
    z = float(stats.norm.ppf(change.confidence) + stats.norm.ppf(power))
    least = change.num_prompts_for(min_prompts)

    def number(log_ratio: float) -> int | None:
        slack = log_ratio - math.log1p(-max_relative_drop)
        if slack <= 0:
            return None
        return max(2, least, math.ceil((z * change.standard_deviation / slack) ** 2))

    likely = float(stats.norm.ppf(LIKELY)) * change.standard_error
    unchanged = number(0.0)
    assert unchanged is not None  # the limit lies below no change
    return RequiredPrompts(
        fewest=number(change.log_ratio + likely),
        as_measured=number(change.log_ratio),
        most=number(change.log_ratio - likely),
        if_unchanged=unchanged,
    )


def _skewness(values: Floats) -> float:
    """Third central moment over the 3/2th power of the second, for [N] values."""
    away = values - values.mean()
    variance = np.maximum((away**2).mean(), NO_SPREAD**2)
    return float((away**3).mean() / variance**1.5)


def _skewed(quantile: float, tilt: float) -> float:
    """The quantile of (estimate - truth) / SE whose transformed value is `quantile`.

    With a = skewness / sqrt(N), g(x) = x + a x^2 / 3 + a^2 x^3 / 27 + a / 6 is nearly normal; this
    is its inverse (Hall 1992, "On the removal of skewness by transformation").
    """
    root = np.cbrt(1 + tilt * (quantile - tilt / 6))
    return float((3 * quantile - tilt / 2) / (root**2 + root + 1))


def _tokens_and_steps(counts: Sequence[AcceptanceCounts]) -> tuple[Floats, Floats]:
    """[N] float64 emitted tokens and verify steps: whole numbers, exact below 2**53."""
    histograms = np.array([c.histogram for c in counts], dtype=np.float64)
    tokens_by_column = np.arange(1, histograms.shape[1] + 1, dtype=np.float64)
    return histograms @ tokens_by_column, histograms.sum(axis=1)


def _log_ratio(tokens_q: Floats, steps_q: Floats, tokens_b: Floats, steps_b: Floats) -> Floats:
    return np.log((tokens_q / steps_q) / (tokens_b / steps_b))
