"""The target's verify step as it was measured, for one or for several concurrencies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...quantize.errors import EstimateError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a verify step; by concurrency, or under None one for all of them."""

    seconds: Mapping[int | None, float]

    def verify_seconds(self, concurrency: int) -> float | None:
        """As measured at this concurrency; None where it was not."""
        return self.seconds.get(concurrency, self.seconds.get(None))


def parse_step_times(text: str, concurrencies: Sequence[int]) -> StepTimes:
    """Milliseconds of a verify step: `14.2` for every concurrency, or `1=9.5,8=14.2`.

    Raises:
        EstimateError: neither of the two, no positive times, or one of a concurrency that is not
            asked for.
    """
    pairs = [part.rpartition("=") for part in text.split(",")]
    try:
        times = {int(c) if given else None: float(ms) / 1e3 for c, given, ms in pairs}
    except ValueError:
        times = {}
    alone = None in times and len(pairs) > 1
    wrong = any(not 0 < seconds < math.inf for seconds in times.values())
    if not times or alone or wrong or len(times) < len(pairs):
        raise EstimateError(
            "--target-step-ms",
            f"expected milliseconds, or CONCURRENCY=MILLISECONDS with commas between, got {text!r}",
            fix="for example 14.2, or 1=9.5,8=14.2,64=38",
        )
    stray = [c for c in times if c is not None and c not in concurrencies]
    if stray:
        asked = ",".join(map(str, concurrencies))
        raise EstimateError(
            "--target-step-ms",
            f"a time at concurrency {stray[0]}, but --concurrency is {asked}",
            fix="name the concurrencies that were measured: --concurrency "
            + ",".join(str(c) for c in times),
        )
    return StepTimes(seconds=times)


def checked_concurrencies(asked: Sequence[int]) -> tuple[int, ...]:
    """The numbers in ascending order, each once.

    Raises:
        EstimateError: one is below 1.
    """
    if min(asked) < 1:
        raise EstimateError(
            "--concurrency", f"expected at least 1, got {min(asked)}", fix="such as 1,8,64"
        )
    return tuple(sorted(set(asked)))
