"""Two outcomes of each item, right or wrong, under two servers: the change and what bounds it.

Only discordant items say anything: b that the first alone has right, c that the second alone has.
Pure arithmetic.
"""

import math
from dataclasses import dataclass

from scipy import optimize, stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Discordance:
    """How two servers did on the same items.

    Attributes:
        num_items: n, at least 1.
        only_first, only_second: b and c, items that one of them alone has right.
    """

    num_items: int
    only_first: int
    only_second: int

    @property
    def difference(self) -> float:
        """Share right of the second minus that of the first, (c - b) / n."""
        return (self.only_second - self.only_first) / self.num_items

    @property
    def share(self) -> float:
        """Discordant items among all, (b + c) / n."""
        return (self.only_first + self.only_second) / self.num_items


def mcnemar(found: Discordance) -> float:
    """Exact two-sided p: of b + c discordant items so uneven a split, if each side is as likely."""
    total = found.only_first + found.only_second
    if not total:
        return 1.0
    return float(stats.binomtest(found.only_first, total, 0.5).pvalue)


def score_bounds(found: Discordance, confidence: float) -> tuple[float, float]:
    """One-sided bounds of the difference d of shares: Tango's score interval (1998).

    With b and c as above and n items, the bounds are the d at which

        (c - b - n d) / sqrt(n (2 p + d (1 - d))) = +- z,

    p being the likeliest share of items that only the first has right, given d:
    p = (sqrt(B^2 - 8 n C) - B) / (4 n), B = (2 n + b - c) d - b - c, C = -b d (1 - d).
    Where nothing is discordant the bounds are -+ z^2 / (n + z^2), not nothing. Coverage by
    enumeration: tests/test_parity_proportions.py.

    Args:
        confidence: of each bound, in (0.5, 1).

    Returns:
        Lower and upper bound, in [-1, 1].
    """
    z = float(stats.norm.ppf(confidence))
    edge = 1 - 1e-12  # at -1 and 1 the score is 0 / 0
    distance = found.difference

    def bound(sign: float) -> float:
        def beyond(d: float) -> float:
            return _score(found, d) - sign * z

        end = -edge if sign > 0 else edge
        if sign * beyond(end) <= 0:
            return math.copysign(1.0, end)
        inner = min(max(distance, -edge), edge)
        return float(optimize.brentq(beyond, *sorted((end, inner)), xtol=1e-12))

    return bound(1.0), bound(-1.0)


def items_needed(
    share: float, difference: float, margin: float, *, confidence: float, power: float = 0.8
) -> int | None:
    """Items with which a difference like this one clears the margin with probability `power`.

    n = ((z_confidence + z_power) / (margin + difference))^2 * share, rounded up; None where no
    number is enough.

    Args:
        share: of discordant items, above 0.
        difference: of shares, second minus first.
        margin: that the second may lose, above 0.
    """
    slack = margin + difference
    if slack <= 0:
        return None
    z = float(stats.norm.ppf(confidence) + stats.norm.ppf(power))
    return math.ceil(z**2 * share / slack**2)


def _score(found: Discordance, d: float) -> float:
    """Falls from above z to below -z as d rises."""
    n, b, c = found.num_items, found.only_first, found.only_second
    linear = (2 * n + b - c) * d - b - c
    constant = -b * d * (1 - d)
    # b counts as Tango's x21: its share is the one that d leaves free.
    root = math.sqrt(max(0.0, linear * linear - 8 * n * constant))
    p = max(0.0, (root - linear) / (4 * n))
    variance = n * (2 * p + d * (1 - d))
    above = c - b - n * d
    if variance <= 0:
        return math.copysign(math.inf, above) if above else 0.0
    return above / math.sqrt(variance)
