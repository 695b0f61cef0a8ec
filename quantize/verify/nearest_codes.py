"""The nearest codes, computed once more from the weight: bit for bit what this package writes.

Weight / scale is one float32 division; INT4 multiplies by the rounded inverse, as AMD Quark does.
"""

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ..stored.declarations import DeclaredScheme
from ..stored.decoded_numbers import Bytes, Floats
from ..stored.linear import spread
from .code_judge import Buffers, Judge
from .rounded_values import e2m1_rounded, e4m3_rounded
from .verify_report import Fault

INT4_MIN, INT4_MAX = np.float32(-8), np.float32(7)
NEGATIVE_ZERO = 8
"""The code of -0 in FP4."""
E4M3_NEGATIVE_ZERO = 0x80


class Nearest(Judge):
    """Codes against the nearest ones.

    Args:
        scheme: what the folder declares.
        scale: [out_features, groups] or [1, 1] float32, by which a weight is divided to get a code;
            of two stages, the second.
        first_scale: of a first stage of two, else None.
        buffers: shared with the caller, which may use "x" between two blocks.
        carried: INT4 codes are stored as F8_E4M3, where -0 is no code.
    """

    def __init__(
        self,
        scheme: DeclaredScheme,
        scale: Floats,
        first_scale: np.float32 | None,
        buffers: Buffers,
        *,
        carried: bool = False,
    ) -> None:
        self._carried = carried
        self._scheme = scheme
        self._first_scale = first_scale
        with np.errstate(all="ignore"):  # scales that are no scales are faults of their own
            int4 = scheme.number.is_integer
            self._scale = np.float32(1) / scale if int4 else scale  # of INT4 the inverse
        self._buffers = buffers
        self._worst = (0, 0, 0.0, 0.0, 0.0)  # row, column, weight, code, nearest

    @override
    def add(self, first_row: int, w: Floats, codes: Floats, stored: Bytes) -> None:
        x = self._buffers.get("x", w.shape)
        with np.errstate(all="ignore"):  # a weight that is no number has scales that are faults
            nearest = self.values(first_row, w, x)
        fp8 = self._scheme.number.is_fp8
        # Bits tell -0 from 0, and no NaN is the nearest to anything.
        different = nearest.view(np.uint32) != codes.view(np.uint32) if fp8 else nearest != codes
        if self._carried:
            different |= stored.reshape(w.shape) == E4M3_NEGATIVE_ZERO
        if self._scheme.number.is_fp4:
            different |= self._wrong_zeros(w, nearest, stored)
        count = int(np.count_nonzero(different))
        if count and not self.wrong:
            row, column = divmod(int(different.argmax()), w.shape[1])
            found = (float(array[row, column]) for array in (w, codes, nearest))
            self._worst = (first_row + row, column, *found)
        self.wrong += count

    def values(self, first_row: int, w: Floats, x: Floats) -> Floats:
        """The nearest codes' values, in `x`, which is another array than `w`."""
        scheme, step = self._scheme, self._buffers.get("step", w.shape)
        rows = slice(None) if len(self._scale) == 1 else slice(first_row, first_row + len(w))
        scale = spread(self._scale[rows], scheme.group_size, w.shape[1])
        if scheme.number.is_integer:
            if self._first_scale is not None:
                w = e4m3_rounded(np.divide(w, self._first_scale, out=x), out=x, step=step)
            np.rint(np.multiply(w, scale, out=x), out=x)
            return np.clip(x, INT4_MIN, INT4_MAX, out=x)
        np.divide(w, scale, out=x)
        rounded = e4m3_rounded if scheme.number.is_fp8 else e2m1_rounded
        return rounded(x, out=x, step=step)

    def _wrong_zeros(self, w: Floats, nearest: Floats, stored: Bytes) -> npt.NDArray[np.bool_]:
        """FP4 zeros of the wrong sign: NVFP4 keeps that of the weight, MXFP4 has no -0."""
        nibbles = np.empty((stored.size, 2), np.uint8)
        np.bitwise_and(stored, 15, out=nibbles[:, 0])
        np.right_shift(stored, 4, out=nibbles[:, 1])
        negative: npt.NDArray[np.bool_] = nibbles.reshape(w.shape) == NEGATIVE_ZERO
        if self._scheme.number.powers_of_two:
            return negative
        wanted: npt.NDArray[np.bool_] = (nearest == 0) & (w < 0)
        return np.not_equal(negative, wanted, out=wanted)

    @override
    def faults(self, name: str) -> list[Fault]:
        if not self.wrong:
            return []
        row, column, w, code, nearest = self._worst
        got = (
            f"{self.wrong} other(s), first at row {row}, column {column}: code {code:g} of the"
            f" weight {w:.6g}, whose nearest is {nearest:g}"
        )
        return [Fault(where=name, expected="the quantized values nearest to weight/scale", got=got)]
