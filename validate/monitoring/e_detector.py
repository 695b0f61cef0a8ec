"""An e-detector: has a mean fallen, asked after every reading, for ever?

Source: Shin, Ramdas, Rinaldo, "E-detectors: a nonparametric framework for sequential change
detection", The New England Journal of Statistics in Data Science 2 (2023), 229-260,
doi 10.51387/23-NEJSDS51 (arXiv 2203.03532). This is their Shiryaev-Roberts form: at every reading
an e-process begins anew, as if the change were now, and M is the sum of them all,
M = (M + w) x e for each reading, averaged over a mixture of bets. Without a change the mean of M at
any stopping time is at most the sum of the weights w until then.

The weights are alpha-spending over time: one half for a change before the first reading, and one
half a day after it. An alarm at M >= 1 / alpha, after which M begins at 0, therefore comes at most
alpha x (1 + days) / 2 times in the mean: at most alpha in the first day and in every further one,
whatever the times between readings are. A reading without verify steps spends nothing, and one
after a longer pause (or a clock that was set) what a day spends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from ..counting.jackknife import Floats
from .bets import Limit

DAY = 86_400.0
_SPENT = 0.5
"""At the beginning, and in each day."""
_NOTHING = -700.0
"""Logarithm of what is taken for 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """What was counted since a change began, as far as one can tell.

    Attributes:
        seconds: since then. verify_steps, accepted: in that time.
    """

    seconds: float
    verify_steps: float
    accepted: float

    @property
    def mean_acceptance_length(self) -> float:
        """Of these steps; not a number without any."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where a detector stands; one row for each bet.

    Attributes:
        log_sums: [bets] natural logarithm of the sum of its e-processes.
        log_best: [bets] of the largest of those e-processes, at least 0.
        since: [bets] what was counted since that one began.
    """

    log_sums: tuple[float, ...]
    log_best: tuple[float, ...]
    since: tuple[Fall, ...]

    @classmethod
    def beginning(cls, bets: int, *, again: bool = False) -> "Evidence":
        """Before the first reading; `again`: after an alarm."""
        return cls(
            log_sums=(_NOTHING if again else math.log(_SPENT),) * bets,
            log_best=(0.0,) * bets,
            since=(Fall(seconds=0, verify_steps=0, accepted=0),) * bets,
        )

    @property
    def log_mean(self) -> float:
        """Natural logarithm of M, the mean over bets."""
        return float(logsumexp(self.log_sums)) - math.log(len(self.log_sums))

    @property
    def fall(self) -> Fall:
        """Of the bet that won most: the change that is most likely."""
        return self.since[max(range(len(self.log_best)), key=self.log_best.__getitem__)]


def after(
    evidence: Evidence, limit: Limit, *, verify_steps: float, accepted: float, seconds: float
) -> Evidence:
    """The evidence with one more reading.

    Args:
        evidence: before it.
        limit: of the mean acceptance length.
        verify_steps: since the reading before.
        accepted: draft tokens in them.
        seconds: since the reading before, at least 0.
    """
    won = _logs(limit, verify_steps, accepted)
    days = min(seconds / DAY, 1.0) if verify_steps else 0.0
    spent = math.log(max(_SPENT * days, math.exp(_NOTHING)))
    sums = np.maximum(np.logaddexp(evidence.log_sums, spent) + won, _NOTHING)
    return Evidence(
        log_sums=tuple(sums.tolist()),
        log_best=tuple(
            max(0.0, own + log) for own, log in zip(evidence.log_best, won, strict=True)
        ),
        since=tuple(_since(evidence, won, verify_steps, accepted, seconds)),
    )


def _logs(limit: Limit, verify_steps: float, accepted: float) -> Floats:
    """[bets] logarithm of what each bet makes of 1 in these steps."""
    below = limit.lowest * verify_steps - (verify_steps + accepted)
    stakes = np.array([bet.stake for bet in limit.bets])
    return stakes * below - np.array([bet.price for bet in limit.bets]) * verify_steps


def _since(
    evidence: Evidence, won: Sequence[float] | Floats, steps: float, accepted: float, seconds: float
) -> list[Fall]:
    """What each bet counted since its sum of logarithms was last 0, as CUSUM does."""
    return [
        Fall(seconds=0, verify_steps=0, accepted=0)
        if best + log <= 0
        else Fall(
            seconds=old.seconds + seconds,
            verify_steps=old.verify_steps + steps,
            accepted=old.accepted + accepted,
        )
        for old, best, log in zip(evidence.since, evidence.log_best, won, strict=True)
    ]
