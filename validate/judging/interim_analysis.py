"""Looking at a growing set of prompts more than once, with boundaries that keep the promised error.

At look i of n the z value has to clear c_i, so that under the limit itself, where each look's z is
standard normal and corr(z_i, z_j) = sqrt(i / j), the chance that any of n looks clears is still
1 - confidence:

    pocock           c_i = C                 the same bound at every look
    obrien-fleming   c_i = C * sqrt(n / i)   hard at first, at the last look hardly wider than one

C is computed, by the recursion of Armitage, McPherson and Rowe (1969) over the density of the sums
that have not crossed yet. Source of the two shapes: Jennison & Turnbull, Group Sequential Methods
(2000), chapter 2, whose two-sided tables at 0.10 are these at a confidence of 0.95.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import GateError

if TYPE_CHECKING:
    import numpy as np

Spending = Literal["obrien-fleming", "pocock"]

MAX_LOOKS = 10
_NUM_NODES = 128  # of Gauss-Legendre: C is right to 1e-6 up to MAX_LOOKS
_FAR = 9.0  # standard deviations: what lies beyond is below 1e-18


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Planned interim analysis `number` of `total`, each after adding as many prompts."""

    number: int
    total: int
    spending: Spending

    def problem(self) -> str:
        """What is wrong with its numbers; empty if nothing."""
        if not 1 <= self.number <= self.total <= MAX_LOOKS:
            return f"expected 1 <= number <= total <= {MAX_LOOKS}"
        return ""

    @property
    def is_last(self) -> bool:
        """Nothing was planned beyond."""
        return self.number == self.total

    def adjusted_confidence(self, confidence: float) -> float:
        """The confidence of this look's bounds with which all looks together keep `confidence`.

        Args:
            confidence: in (0.5, 1).

        Returns:
            In [confidence, 1).
        """
        from scipy import stats

        boundary = boundaries(self.total, self.spending, confidence)[self.number - 1]
        return min(float(stats.norm.cdf(boundary)), math.nextafter(1.0, 0.0))


def parse_look(text: str | None, spending: Spending | None) -> Look | None:
    """`--look` and `--spending` of the command line.

    Args:
        text: "i/n" with 1 <= i <= n <= MAX_LOOKS, or None for a single look.
        spending: None for O'Brien-Fleming.

    Raises:
        GateError: no such look, or a spending without a look.
    """
    if text is None:
        if spending is not None:
            raise GateError("--spending", "needs --look, got none", fix="add --look i/n")
        return None
    number, _, total = text.partition("/")
    plain = all(part.isascii() and part.isdigit() and len(part) < 4 for part in (number, total))
    if not plain or not 1 <= int(number) <= int(total) <= MAX_LOOKS:
        raise GateError(
            "--look",
            f"expected i/n with 1 <= i <= n <= {MAX_LOOKS}, got {text!r}",
            fix="write the second of three planned interim analyses as 2/3",
        )
    return Look(number=int(number), total=int(total), spending=spending or "obrien-fleming")


@functools.cache
def boundaries(total: int, spending: Spending, confidence: float) -> tuple[float, ...]:
    """c_1 ... c_total, one-sided, in standard deviations."""
    import numpy as np  # here, as scipy: together they take a second, and the gate's help no bound
    from scipy import optimize, stats

    shape = np.ones(total)
    if spending == "obrien-fleming":
        shape = np.sqrt(total / np.arange(1, total + 1))
    alpha = 1 - confidence
    least, most = stats.norm.isf(alpha), stats.norm.isf(alpha / total)  # one look; Bonferroni
    if total > 1:
        least = optimize.brentq(
            lambda c: crossing_probability(c * shape) - alpha, least, most, xtol=1e-9
        )
    return tuple(float(c) for c in least * shape)


def crossing_probability(boundary: "Sequence[float] | np.ndarray") -> float:
    """Chance that a standard normal walk, seen at equally spaced looks, is ever above `boundary`.

    Args:
        boundary: of z at looks 1 .. n; the sum of k standard normal steps is z * sqrt(k).
    """
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(_NUM_NODES)
    before, mass = np.zeros(1), np.ones(1)  # the walk's places so far, and their probabilities
    for look, limit in enumerate(boundary, start=1):
        low, high = -_FAR * math.sqrt(look), min(limit, _FAR) * math.sqrt(look)
        places = low + (high - low) * (nodes + 1) / 2
        density = np.exp(-0.5 * (places[:, None] - before) ** 2) @ mass / math.sqrt(2 * math.pi)
        before, mass = places, density * weights * (high - low) / 2
    return 1 - float(mass.sum())
