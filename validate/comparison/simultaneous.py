"""Intervals that hold all at once: the chance that any of them misses is what one's was.

The estimates share their prompts, so they are correlated, and what Bonferroni adds for each is more
than is needed. Here the largest of all statistics decides (max-t): Z is normal with the
correlations of the estimates' jackknife contributions, c the quantile of max |Z_j|, and each
interval has the level 2 Phi(c) - 1 under Student's t of its own degrees of freedom, so that
estimates of few prompts get wider ones. The quantile is drawn, from one fixed seed.

Source of the method: Westfall & Young, Resampling-based multiple testing (1993), as balanced
single-step intervals. By simulation (three drafts, 1000 runs) 95 % intervals of five scopes all
hold in 0.955 of the runs with 20 prompts in a category, in 0.934 with 10; separate ones in 0.63.
`tests/test_comparison.py` holds that.

The draws take a time that grows with the square of the number of estimates, so beyond
`MOST_CORRELATED` of them Bonferroni decides, which is wider and always holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..counting.jackknife import NO_SPREAD, Floats

NUM_DRAWS = 40_000  # the level is off by 0.001
MOST_CORRELATED = 400
"""Estimates whose correlations are used: a second of one core; of 3,000 it would be minutes."""
_CHUNK = 4_000
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One of several estimates on the same prompts.

    Attributes:
        value: a log-ratio.
        contributions: [N] of each prompt; their sum of squares is the squared standard error.
        degrees: of freedom, at least 1.
    """

    value: float
    contributions: Floats
    degrees: float

    @property
    def standard_error(self) -> float:
        """Of the value."""
        return float(np.sqrt((self.contributions**2).sum()))

    @property
    def has_spread(self) -> bool:
        """Whether the prompts differ in it at all."""
        return self.standard_error > NO_SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Simultaneous:
    """Two-sided intervals.

    Attributes:
        each: the confidence of each alone; all together have the one that was asked for.
        by_correlation: max-t decided, and not Bonferroni.
        bounds: lower and upper of every estimate.
    """

    each: float
    by_correlation: bool
    bounds: tuple[tuple[float, float], ...]


def simultaneous(
    estimates: Sequence[Estimate], confidence: float, *, at_least: int = 0
) -> Simultaneous:
    """Intervals of all estimates that hold together.

    Args:
        estimates: on the same prompts, in one order.
        confidence: of all together, in (0, 1).
        at_least: so many intervals hold together, of which these are some.
    """
    spread = [estimate for estimate in estimates if estimate.has_spread]
    number = max(len(spread), at_least)
    by_correlation = number <= MOST_CORRELATED
    if not spread:
        each = confidence
    elif by_correlation:
        each = level_of_each(spread, confidence)
    else:
        each = bonferroni(number, confidence)
    degrees = np.array([estimate.degrees for estimate in estimates])
    quantiles = stats.t.ppf((1 + each) / 2, degrees)
    bounds = []
    for estimate, quantile in zip(estimates, map(float, quantiles), strict=True):
        reach = quantile * estimate.standard_error
        bounds.append((estimate.value - reach, estimate.value + reach))
    return Simultaneous(each=each, by_correlation=by_correlation, bounds=tuple(bounds))


def level_of_each(estimates: Sequence[Estimate], confidence: float) -> float:
    """The confidence of each interval with which all of them have `confidence`.

    Args:
        estimates: with spread, at least one.
        confidence: in (0, 1).

    Returns:
        At least `confidence`, at most what Bonferroni asks for.
    """
    rows = np.stack([one.contributions / one.standard_error for one in estimates])
    values, vectors = np.linalg.eigh(rows @ rows.T)
    factor = vectors * np.sqrt(np.maximum(values, 0))
    generator = np.random.default_rng(_SEED)
    largest = np.concatenate(
        [
            np.abs(generator.standard_normal((_CHUNK, len(rows))) @ factor.T).max(axis=1)
            for _ in range(NUM_DRAWS // _CHUNK)
        ]
    )
    drawn = 2 * float(stats.norm.cdf(np.quantile(largest, confidence))) - 1
    return min(max(drawn, confidence), bonferroni(len(rows), confidence))


def bonferroni(number: int, confidence: float) -> float:
    """The confidence of each of `number` intervals that is enough whatever their correlations."""
    return 1 - (1 - confidence) / number
