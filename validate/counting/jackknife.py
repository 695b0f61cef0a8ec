"""The jackknife: how far an estimate is off, told by leaving each prompt out in turn.

With theta of all N prompts, and theta_-i of all but prompt i:

    psi_i = N theta - (N - 1) theta_-i,         SE(theta) = sd(psi) / sqrt(N)
    c_i = sqrt((N - 1) / N) (theta_-i - mean),  SE(theta)^2 = sum c_i^2

which are one error in two forms: pseudo-values have a spread and a skewness, contributions of
several estimates on the same prompts have correlations. Where prompts weigh differently, as many as
the effective sample size say it, and Student's t has one degree of freedom less than that.

Pure arithmetic: it knows neither drafts nor files, and draws no random number.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]

NO_SPREAD = 1e-12
"""What rounding leaves of a standard error of zero."""


def sums_without(values: Floats) -> Floats:
    """[..., N] the sums of all values but each one."""
    without: Floats = values.sum(-1, keepdims=True) - values
    return without


def pseudo_values(whole: Floats, without: Floats) -> Floats:
    """The psi of [..., 1] theta and [..., N] theta_-i: their mean is the estimate less its bias."""
    count = without.shape[-1]
    values: Floats = count * whole - (count - 1) * without
    return values


def contributions(without: Floats) -> Floats:
    """The c of [..., N] theta_-i."""
    count = without.shape[-1]
    centred = without - without.mean(axis=-1, keepdims=True)
    own: Floats = math.sqrt((count - 1) / count) * centred
    return own


def variance(without: Floats) -> float:
    """The squared standard error, of [N] theta_-i."""
    return float((len(without) - 1) * without.var())


def effective_sample_size(weights: Floats) -> Floats:
    """As many items of equal weight would say as much: in [1, N] of [..., N] weights."""
    size: Floats = weights.sum(-1) ** 2 / (weights**2).sum(-1)
    return size


def t_quantile(confidence: float, degrees_of_freedom: Floats | float) -> Floats:
    """Of Student's t, with one degree of freedom at least."""
    quantile: Floats = stats.t.ppf(confidence, np.maximum(1.0, degrees_of_freedom))
    return quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A figure.

    Attributes:
        lower, upper: one-sided bounds, each at `confidence`; the estimate itself where a single
            cluster says nothing about spread.
        num_clusters: prompts that it rests on.
    """

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
    """Sum of sums over sum of counts, with its bounds, clusters of prompts being what is sampled.

    With m = sum s / sum n the bounds are m -+ t_{confidence, df} SE, where
    df = max(1, (sum n)^2 / sum n^2 - 1). With equal counts this is the mean of the clusters' means
    with its t bounds.

    Args:
        sums: [N] of each cluster, finite.
        counts: [N] what they are sums over, above 0.
        confidence: of each bound, in (0.5, 1).

    Raises:
        ValueError: no cluster, or a count that is not above 0.
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
