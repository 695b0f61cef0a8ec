"""Bets against golden acceptance: what each wins and costs, computed from golden's own requests.

A bet of stake s wins s for every token of a block of verify steps below the limit of the mean, and
pays a price for every step. The price makes it fair: for the requests of golden, whose tokens lie
above and below their own mean by chance, exp(s x tokens below - price x steps) is 1 in the mean. A
fair bet is an e-value, whatever the mean is, as long as it is not below the limit.

For small stakes the price is s^2 / 2 times the variance of a step times the design effect, the
bound of sub-Gaussian sums. For large ones it follows the tails that golden has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from ..counting.jackknife import Floats
from ..errors import GoldenError
from ..golden.golden import GoldenCategory, GoldenPrompt

LOSSES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Relative losses beyond the limit, each of which one bet finds fastest."""
ACCURACY = 1.959963984540054
"""Standard errors of golden's mean that count as its inaccuracy: to the lower end of its 95 %
interval, beyond which one golden acceptance in forty is. With the one-sided bound (1.645, one in
twenty) a loss of just the tolerated drop alarmed on more than 1 % of days (`bench_watch`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bet:
    """One bet.

    Attributes:
        stake: per token below the limit. price: per verify step.
    """

    stake: float
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the acceptance of some requests must not fall below, and the bets against it.

    Attributes:
        golden: mean acceptance length.
        standard_error: of it.
        lowest: mean acceptance length at the limit: the lower end of golden's 95 % interval, less
            the drop that is tolerated.
        variance: of the mean over verify steps, times their number; requests (clusters of golden)
            are independent, their steps are not.
        bets: of equal weight.
    """

    golden: float
    standard_error: float
    lowest: float
    variance: float
    bets: tuple[Bet, ...]

    @property
    def drop(self) -> float:
        """Relative drop that is never taken for one: the tolerated one, and golden's inaccuracy."""
        return 1 - self.lowest / self.golden


def limit_of(prompts: Sequence[GoldenPrompt], max_drop: float, where: str = "golden") -> Limit:
    """The limit of requests like these.

    Args:
        prompts: golden's, of one category or all; at least one.
        max_drop: relative drop that is tolerated, in (0, 1).
        where: they are from, for errors.

    Raises:
        GoldenError: they do not say how much acceptance varies.
    """
    found, sums = GoldenCategory.of(prompts), _sums(prompts)
    error, mean = found.standard_error, found.mean_acceptance_length
    below = (mean - 1) * sums[:, 1] - sums[:, 0]
    variance = float((below**2).sum() / sums[:, 1].sum())
    if error is None or not variance > 0:
        raise GoldenError(
            where,
            "does not say how much requests differ: it has one prompt, or all accept alike",
            fix="write it of more prompts (draftquant replay --golden)",
        )
    return Limit(
        golden=mean,
        standard_error=error,
        lowest=(mean - ACCURACY * error) * (1 - max_drop),
        variance=variance,
        bets=tuple(_fair(loss * mean / variance, below, sums[:, 1]) for loss in LOSSES),
    )


def _sums(prompts: Sequence[GoldenPrompt]) -> Floats:
    """[clusters, 2] accepted draft tokens and verify steps."""
    sums: dict[int, Floats] = {}
    for one in prompts:
        own = np.array([one.counts.num_accepted_draft_tokens, one.counts.num_steps], dtype=float)
        sums[one.cluster] = sums.get(one.cluster, 0) + own
    return np.stack(list(sums.values()))


def _fair(stake: float, below: Floats, steps: Floats) -> Bet:
    """The price at which the mean of exp(stake x below - price x steps) is 1.

    Args:
        stake: above 0.
        below: [clusters] tokens below the mean of them all, so that their sum is 0.
        steps: [clusters] verify steps.
    """

    def excess(price: float) -> float:
        return float(logsumexp(stake * below - price * steps) - np.log(len(below)))

    highest = float((stake * below / steps).max())  # at this price no cluster wins anything
    return Bet(stake=stake, price=brentq(excess, 0.0, highest, xtol=1e-15))
