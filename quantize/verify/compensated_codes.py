"""Codes that make up for the errors of others: the weight alone does not say what they must be.

It does say how far off they may be. Compensation moves codes by a step here and there, and adds
half as much again to the error of the nearest codes (measured: 1.3 to 1.6 times). Codes in another
order, of another linear or under other scales are off by several times that.
"""

import numpy as np
from typing_extensions import override

from ..stored.decoded_numbers import Floats
from ..stored.linear import StoredLinear, spread
from .code_judge import Block, Buffers, Judge, Numbers
from .nearest_codes import Nearest
from .verify_report import Fault

MOST_OF_LINEAR = 4.0
"""How many times the error of the nearest codes; of a row twice as many: few codes vary more."""
_SMALLEST = 1 / 48
"""Mean square of what rounding to half a step adds; rows that codes say exactly are taken so."""


class Near(Judge):
    """Codes against the error of the nearest ones under the same scales.

    Args:
        numbers: what single codes must be.
        linear: has the scales. group_size: inputs that share one; None where all do.
        most: how many times the error of the nearest codes the linear may have.
    """

    def __init__(
        self,
        numbers: Numbers,
        nearest: Nearest,
        linear: StoredLinear,
        group_size: int | None,
        buffers: Buffers,
        *,
        most: float = MOST_OF_LINEAR,
    ) -> None:
        self._most = most
        self._numbers, self._nearest = numbers, nearest
        self._linear, self._group_size, self._buffers = linear, group_size, buffers
        self._ratios: list[Floats] = []
        self._lost, self._least = 0.0, 0.0

    @override
    def add(self, block: Block) -> None:
        self._numbers.add(block)
        self.wrong = self._numbers.wrong
        first_row, w, codes = block.first_row, block.w, block.codes
        rows = range(first_row, first_row + len(w))
        scale = spread(self._linear.scale_of(rows), self._group_size, w.shape[1])
        lost = self._squares(w, codes, scale)
        nearest = self._nearest.values(first_row, w, self._buffers.get("x", w.shape))
        least = self._squares(w, nearest, scale)
        least = np.maximum(least, _SMALLEST * np.mean(scale**2, axis=1) * w.shape[1])
        self._ratios.append(np.sqrt(lost / least))
        self._lost += float(lost.sum(dtype=np.float64))
        self._least += float(least.sum(dtype=np.float64))

    def _squares(self, w: Floats, codes: Floats, scale: Floats) -> Floats:
        """Sum of the squared errors of each row."""
        lost = np.multiply(codes, scale, out=self._buffers.get("lost", w.shape))
        np.subtract(w, lost, out=lost)
        squares: Floats = np.einsum("ij,ij->i", lost, lost)
        return squares

    @override
    def faults(self, name: str) -> list[Fault]:
        if self.wrong:
            return self._numbers.faults(name)
        ratios = np.concatenate(self._ratios)
        row, whole = int(ratios.argmax()), (self._lost / self._least) ** 0.5
        if whole > self._most:
            return [_fault(name, self._most, f"{whole:.3g} times")]
        if ratios[row] > 2 * self._most:
            return [_fault(name, 2 * self._most, f"{ratios[row]:.3g} times in row {row}")]
        return []


def _fault(name: str, most: float, got: str) -> Fault:
    expected = f"quantized values with at most {most:g} times the error of the nearest"
    return Fault(where=name, expected=expected, got=got)
