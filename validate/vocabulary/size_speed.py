"""What a size is worth in time: how long drafting takes, and the speed-up beside a target.

Of figures of `estimate` and of the measured change of the acceptance length r - 1:

    speed-up = r * (drafting of all rows + verify) / (drafting + verify)

The head becomes cheaper for every draft step, whatever the text; what it costs in accepted tokens
is paid in verify steps of the target. So without the time of a verify step no speed-up is known,
but the longest verify step at which a size still pays is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...quantize.estimate.work import Machine, Round
from .size_curve import ChoiceCurve, SizeChange, SizeCurve
from .step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSpeed:
    """One size on one machine at one concurrency; times in seconds.

    Attributes:
        size: rows of the head, all of them too.
        pays_below: verify steps shorter than that are sped up; infinity where all are, None where
            none is; None too for all rows.
        verify: the target's verify step; None where it is not known.
        speed_up: relative to all rows, 0 = as fast; None where the verify step is not known.
        lower, upper: the same at the bounds of the acceptance length.
    """

    size: int
    drafting: float
    pays_below: float | None
    verify: float | None
    speed_up: float | None
    lower: float | None
    upper: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds:
    """All sizes on one machine at one concurrency.

    Attributes:
        speeds: by size, all rows last.
    """

    gpu: str
    concurrency: int
    speeds: tuple[SizeSpeed, ...]

    @property
    def recommended(self) -> SizeSpeed | None:
        """The fastest by what was measured; None where no verify step is known."""
        return self._fastest("speed_up")

    @property
    def range(self) -> tuple[int, ...]:
        """The sizes that are the fastest if every size is at its lower bound, or at its upper."""
        ends = (self._fastest("lower"), self._fastest("upper"))
        return tuple(sorted({end.size for end in ends if end is not None}))

    def _fastest(self, figure: str) -> SizeSpeed | None:
        known = [one for one in self.speeds if getattr(one, figure) is not None]
        # Of equal ones the larger head, which loses less on text like none of the prompts.
        return max(known, key=lambda one: (getattr(one, figure), one.size), default=None)


def size_speeds(
    curve: SizeCurve,
    chosen: ChoiceCurve,
    rounds: Mapping[int, Round],
    machines: Sequence[Machine],
    target: StepTimes | None,
    concurrencies: Sequence[int],
) -> tuple[MachineSpeeds, ...]:
    """Every size on every machine at every concurrency.

    Args:
        rounds: of the draft by size, that of all its rows too.
        target: whose verify step ends a round; None = not known.
        concurrencies: sequences at once.
    """
    found = []
    for machine in machines:
        for concurrency in concurrencies:
            verify = None if target is None else target.verify_seconds(concurrency)
            whole = machine.round_seconds(rounds[curve.num_rows], concurrency)
            speeds = [
                _speed(one, machine.round_seconds(rounds[one.size], concurrency), whole, verify)
                for one in chosen.whole
            ]
            known = 0.0 if verify is not None else None
            speeds.append(
                SizeSpeed(
                    size=curve.num_rows,
                    drafting=whole,
                    pays_below=None,
                    verify=verify,
                    speed_up=known,
                    lower=known,
                    upper=known,
                )
            )
            found.append(
                MachineSpeeds(gpu=machine.gpu.name, concurrency=concurrency, speeds=tuple(speeds))
            )
    return tuple(found)


def _speed(one: SizeChange, drafting: float, whole: float, verify: float | None) -> SizeSpeed:
    def speed_up(change: float) -> float | None:
        if verify is None:
            return None
        return (1 + change) * (whole + verify) / (drafting + verify) - 1

    return SizeSpeed(
        size=one.size,
        drafting=drafting,
        pays_below=_pays_below(one.relative_change, drafting, whole),
        verify=verify,
        speed_up=speed_up(one.relative_change),
        lower=speed_up(one.lower),
        upper=speed_up(one.upper),
    )


def _pays_below(change: float, drafting: float, whole: float) -> float | None:
    """Where r (whole + v) = drafting + v, that is v = (r whole - drafting) / (1 - r)."""
    saved = (1 + change) * whole - drafting
    if saved <= 0:
        return None
    return math.inf if change >= 0 else saved / -change
