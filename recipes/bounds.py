"""What a number may be, said in one way and refused in one way."""

import math
from dataclasses import dataclass

from .errors import DraftQuantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """From a smallest number to a largest; infinity is no number.

    Attributes:
        least: smallest. above: what it has to be larger than instead.
        most: largest. below: what it has to be smaller than instead.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            abs(value) < math.inf
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.most is None and self.below is None:
            return f"at least {self.least}" if self.above is None else f"more than {self.above}"
        low = f"[{self.least}" if self.above is None else f"({self.above}"
        high = f"{self.most}]" if self.below is None else f"{self.below})"
        return f"a share in {low}, {high}"

    def problem(self, value: float | None) -> str:
        """What is wrong with a number, as expected and got; empty if nothing, or none is given."""
        return "" if value is None or value in self else f"expected {self}, got {value}"

    def check(
        self, error: type[DraftQuantError], where: str, value: float | None, *, fix: str
    ) -> None:
        """Refuse a number; None = none is given.

        Raises:
            DraftQuantError: of this type, it is out of bounds.
        """
        if problem := self.problem(value):
            raise error(where, problem, fix=fix)


AT_LEAST_0, AT_LEAST_1, AT_LEAST_2 = (Bounds(least=number) for number in range(3))
ABOVE_0 = Bounds(above=0)
SHARE = Bounds(above=0, below=1)
SHARE_OR_ALL = Bounds(above=0, most=1)
CONFIDENCE = Bounds(above=0.5, below=1)
"""Of a one-sided bound."""
