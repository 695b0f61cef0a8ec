"""A mean over tokens, pooled over prompts, and its bounds with prompts as the unit of sampling."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


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
    """Sum of sums over sum of counts, with the bounds of the jackknife over clusters.

    With m = sum s / sum n and m_-i the same without cluster i, as in `paired_change`:

        psi_i = N m - (N - 1) m_-i,   SE = sd(psi) / sqrt(N),
        bounds = m -+ t_{confidence, df} SE,   df = max(1, (sum n)^2 / sum n^2 - 1).

    With equal counts this is the mean of the clusters' means with its t bounds.

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
    mean, count = float(s.sum() / n.sum()), len(s)
    error = 0.0
    if count > 1:
        without = (s.sum() - s) / (n.sum() - n)
        pseudo_values = count * mean - (count - 1) * without
        effective = float(n.sum() ** 2 / (n**2).sum())
        quantile = float(stats.t.ppf(confidence, max(1.0, effective - 1)))
        error = quantile * float(pseudo_values.std(ddof=1)) / math.sqrt(count)
    return Bounded(
        estimate=mean,
        lower=mean - error,
        upper=mean + error,
        confidence=confidence,
        num_clusters=count,
    )
