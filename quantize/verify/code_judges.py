"""Judges of the codes of one linear, block by block: they compute the nearest codes once more.

Weight / scale is one float32 division; integers multiply by the rounded inverse, as AMD Quark does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ..stored.decoded_numbers import Bytes, Floats
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.linear import StoredLinear, spread
from .comparison import Fault
from .scales import e2m1_rounded, e4m3_rounded, sign_bytes


class Block:
    """Rows of a linear, in arrays that are reused; for transposed codes `stored` has all bytes."""

    def __init__(
        self, first_row: int, w: Floats, stored: Bytes, decode: Callable[[], Floats]
    ) -> None:
        self.first_row, self.w, self.stored = first_row, w, stored
        self._decode = decode

    @cached_property
    def codes(self) -> Floats:
        """[rows, in_features], decoded; a caller that has them in another way sets them before."""
        return self._decode()


class Judge(ABC):
    """Collects the codes that a rule does not give.

    Attributes:
        max_error: largest |w/scale - code| relative to what is allowed; None where no bounds
            apply.
    """

    wrong = 0
    max_error: float | None = None

    @abstractmethod
    def add(self, block: Block) -> None:
        """Judge a block of rows."""

    @abstractmethod
    def faults(self, name: str) -> list[Fault]:
        """At most one fault, of the tensor `name`."""


class Buffers:
    """Arrays kept from block to block: new ones cost more in page faults than the arithmetic."""

    def __init__(self) -> None:
        self._arrays: dict[str, Floats] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> Floats:
        """A contiguous array of `shape`; each name always has one width, and never more rows."""
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = np.empty(shape, np.float32)
        return array[: shape[0]]


NEGATIVE_ZERO = 8
"""The code of -0 in FP4."""
Ends = Callable[[range], tuple[Floats | float, Floats | float]]


class Nearest(Judge):
    """Compares codes with the nearest ones.

    Args:
        scale: [out_features, groups] or [1, 1] float32, the divisor of weights; with two stages,
            that of the second.
        first_scale: that of the first of two stages, else None.
        buffers: shared with the caller, which may use "x" between two blocks.
        carried: INT4 codes are stored as F8_E4M3, where -0 is not a code.
        ends: smallest and largest code of each row, where zero points move them.
    """

    def __init__(
        self,
        scheme: DeclaredScheme,
        scale: Floats,
        first_scale: np.float32 | None,
        buffers: Buffers,
        *,
        carried: bool = False,
        ends: Ends | None = None,
    ) -> None:
        self._scheme, self._first_scale, self._buffers = scheme, first_scale, buffers
        self._carried, self._ends = carried, ends
        with np.errstate(all="ignore"):  # bad scales are faults of their own
            integer = scheme.number.is_integer
            self._scale = np.float32(1) / scale if integer else scale
        self._worst: tuple[int, int, float, float, float]  # row, column, weight, code, nearest

    @override
    def add(self, block: Block) -> None:
        with np.errstate(all="ignore"):  # a weight that is NaN has bad scales, which are faults
            x = self._buffers.get("x", block.w.shape)
            nearest = self.values(block.first_row, block.w, x)
        different = nearest != block.codes
        if not self._has_right_signs(block):
            zeros = np.flatnonzero(nearest.reshape(-1) == 0)
            different.reshape(-1)[zeros] |= self._wrong_signs(block, zeros)
        count = int(np.count_nonzero(different))
        if count and not self.wrong:
            at = row, column = divmod(int(different.argmax()), x.shape[1])
            values = float(block.w[at]), float(block.codes[at]), float(nearest[at])
            self._worst = (block.first_row + row, column, *values)
        self.wrong += count

    def _has_right_signs(self, block: Block) -> bool:
        """True if all zeros certainly have the right sign: for FP4 that is quick to see."""
        number = self._scheme.number
        if not number.is_fp4:
            return number.is_integer and not self._carried
        if number.powers_of_two:
            low, high = block.stored & np.uint8(0x0F), block.stored & np.uint8(0xF0)
            return not ((low == NEGATIVE_ZERO).any() or (high == NEGATIVE_ZERO << 4).any())
        return np.array_equal(sign_bytes(block.w < 0), block.stored & np.uint8(0x88))

    def _wrong_signs(self, block: Block, zeros: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """The codes here, whose nearest is 0, with a wrong sign: FP8 and NVFP4 keep the weight's.

        Only FP8 keeps the sign of a weight of -0. MXFP4, and INT4 stored as FP8, have no -0.
        """
        number, w = self._scheme.number, block.w.reshape(-1)[zeros]
        negative: npt.NDArray[np.bool_]
        if number.is_fp4:
            negative = (block.stored[zeros // 2] >> 4 * (zeros % 2) & NEGATIVE_ZERO) != 0
        else:
            negative = np.signbit(block.codes.reshape(-1)[zeros])
        if number.is_integer or number.powers_of_two:
            return negative
        wrong: npt.NDArray[np.bool_] = negative != (np.signbit(w) if number.is_fp8 else w < 0)
        return wrong

    def _scale_of(self, first_row: int, w: Floats) -> Floats:
        """The divisor of a block, for integers the inverse; broadcasts to the block."""
        rows = slice(None) if len(self._scale) == 1 else slice(first_row, first_row + len(w))
        return spread(self._scale[rows], self._scheme.group_size, w.shape[1])

    def values(self, first_row: int, w: Floats, x: Floats) -> Floats:
        """The values of the nearest codes, written to `x`, which is not the array `w`."""
        scheme, step = self._scheme, self._buffers.get("step", w.shape)
        scale = self._scale_of(first_row, w)
        if scheme.number.is_integer:
            if self._first_scale is not None:
                w = e4m3_rounded(np.divide(w, self._first_scale, out=x), out=x, step=step)
            np.rint(np.multiply(w, scale, out=x), out=x)
            rows = range(first_row, first_row + len(w))
            largest = np.float32(scheme.number.largest)
            return np.clip(x, *(self._ends(rows) if self._ends else (-largest - 1, largest)), out=x)
        np.divide(w, scale, out=x)
        rounded = e4m3_rounded if scheme.number.is_fp8 else e2m1_rounded
        return rounded(x, out=x, step=step)

    @override
    def faults(self, name: str) -> list[Fault]:
        if not self.wrong:
            return []
        row, column, w, code, nearest = self._worst
        what = f"code {code:g} of the weight {w:.6g}, whose nearest is {nearest:g}"
        got = f"{self.wrong} other(s), first at row {row}, column {column}: {what}"
        return [Fault(name, "the quantized values nearest to weight/scale", got)]


MOST_OF_LINEAR = 4.0
"""Limit, in errors of the nearest codes; doubled for one row, since few codes vary more."""
_SMALLEST = 1 / 48
"""Mean square error of rounding to half a step; also the floor for rows that codes hold exactly."""


class Near(Judge):
    """Codes that compensate the errors of others, by their error relative to the nearest codes'.

    Limit: `most` times the error of the nearest under the same scales. Compensation adds half as
    much again to that error (measured: 1.3 to 1.6 times); codes in another order, of another linear
    or under other scales exceed it several times. Every code is a number; INT4 codes that F8_E4M3
    stores are whole numbers from -8 to 7, never -0.
    """

    def __init__(
        self,
        nearest: Nearest,
        linear: StoredLinear,
        group_size: int | None,
        buffers: Buffers,
        *,
        carried: bool = False,
        most: float = MOST_OF_LINEAR,
    ) -> None:
        self._most, self._carried, self._first = most, carried, (0, 0)
        self._nearest = nearest
        self._linear, self._group_size, self._buffers = linear, group_size, buffers
        self._ratios: list[Floats] = []
        self._lost, self._least = 0.0, 0.0

    @override
    def add(self, block: Block) -> None:
        first_row, w, codes = block.first_row, block.w, block.codes
        wrong = np.isnan(codes)
        if self._carried:
            good = (codes >= -8) & (codes <= 7) & (codes == np.rint(codes))
            wrong = ~(good & ~((codes == 0) & np.signbit(codes)))
        if wrong.any():
            bad = np.argwhere(wrong)
            if not self.wrong:
                self._first = first_row + int(bad[0, 0]), int(bad[0, 1])
            self.wrong += len(bad)
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
        lost = np.multiply(codes, scale, out=self._buffers.get("lost", w.shape))
        np.subtract(w, lost, out=lost)
        squares: Floats = np.einsum("ij,ij->i", lost, lost)
        return squares

    @override
    def faults(self, name: str) -> list[Fault]:
        if self.wrong:
            expected, what = "quantized values that are numbers", "NaN(s)"
            if self._carried:
                expected, what = "whole numbers from -8 to 7", "other(s)"
            got = f"{self.wrong} {what}, first at row {self._first[0]}, column {self._first[1]}"
            return [Fault(name, expected, got)]
        ratios = np.concatenate(self._ratios)
        row, whole = int(ratios.argmax()), (self._lost / self._least) ** 0.5
        most, got = self._most, ""
        if whole > self._most:
            got = f"{whole:.3g} times"
        elif ratios[row] > 2 * self._most:
            most, got = 2 * most, f"{ratios[row]:.3g} times in row {row}"
        expected = f"quantized values with at most {most:g} times the error of the nearest"
        return [Fault(name, expected, got)] if got else []
