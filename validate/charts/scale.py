"""Scales: numbers to places, and round numbers to write beside an axis."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight one: `low` lies at `start`, `high` at `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Its place."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def clipped(self, value: float) -> float:
        """Its place, or the nearer end."""
        return self(min(max(value, self.low), self.high))

    def holds(self, value: float) -> bool:
        """Whether it lies between the ends."""
        return self.low <= value <= self.high


def ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high], at most `most` + 1."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def percent(share: float) -> str:
    """A change beside an axis, such as +0.5%; minus is the sign of typesetting."""
    if abs(share) < 1e-12:
        return "0%"
    return f"{100 * share:+.3g}%".replace("-", "−")  # noqa: RUF001
