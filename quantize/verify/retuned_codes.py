"""Weights that a target taught: their source does not say what they must be.

It says in which direction they point. On the shipped pairs training moves a linear by 1 to 2 % of
its length, and rounding it to four bits by about 10 %; weights of another linear, or in another
order, stand at right angles to it. Which of the many weights around the source's these are, nothing
but their recorded hashes says.
"""

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from ..stored.decoded_numbers import Floats
from ..stored.linear import StoredLinear, spread
from .code_judge import Block, Buffers, Judge, Numbers
from .verify_report import Fault

MIN_COSINE = 0.8
"""Between a weight and the one that it was."""


@dataclass(slots=True)
class Direction:
    """The angle between two weights that are added up block by block."""

    product: float = 0.0
    square: float = 0.0
    other_square: float = 0.0

    def add(self, w: Floats, other: Floats) -> None:
        """A block of rows of both, [rows, in_features]."""
        self.product += _dot(w, other)
        self.square += _dot(w, w)
        self.other_square += _dot(other, other)

    @property
    def cosine(self) -> float:
        """1 where both are zero, NaN where only one is."""
        if not self.square and not self.other_square:
            return 1.0
        length = (self.square * self.other_square) ** 0.5
        return self.product / length if length else float("nan")

    def faults(self, name: str) -> list[Fault]:
        """At most one, of the tensor `name`."""
        if self.cosine >= MIN_COSINE:
            return []
        expected = f"a cosine of at least {MIN_COSINE} with the source's weight"
        return [Fault(where=name, expected=expected, got=f"{self.cosine:.3g}")]


class Retuned(Judge):
    """Codes times scales against the direction of the source's weight.

    Args:
        numbers: what single codes must be.
        linear: has the scales. group_size: inputs that share one; None where all do.
        buffers: shared with the caller.
    """

    def __init__(
        self, numbers: Numbers, linear: StoredLinear, group_size: int | None, buffers: Buffers
    ) -> None:
        self._numbers, self._direction = numbers, Direction()
        self._linear, self._group_size, self._buffers = linear, group_size, buffers

    @override
    def add(self, block: Block) -> None:
        self._numbers.add(block)
        self.wrong = self._numbers.wrong
        first_row, w, codes = block.first_row, block.w, block.codes
        rows = range(first_row, first_row + len(w))
        scale = spread(self._linear.scale_of(rows), self._group_size, w.shape[1])
        served = np.multiply(codes, scale, out=self._buffers.get("lost", w.shape))
        self._direction.add(w, served)

    @override
    def faults(self, name: str) -> list[Fault]:
        return self._numbers.faults(name) if self.wrong else self._direction.faults(name)


def _dot(a: Floats, b: Floats) -> float:
    """In float32 along rows, in float64 over them."""
    return float(np.einsum("ij,ij->i", a, b).sum(dtype=np.float64))
