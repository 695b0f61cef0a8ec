"""Codes of other tools: the nearest to weight / scale but for the roundings of these tools.

Each weight / scale may lie a little beyond half a step from its code: how far is said here.
"""

from functools import partial

import numpy as np
from typing_extensions import override

from ..stored.declarations import DeclaredScheme
from ..stored.decoded_numbers import Floats
from ..stored.linear import StoredLinear, spread
from .code_judge import Block, Buffers, Judge, Numbers
from .compensated_codes import Near
from .nearest_codes import Nearest
from .rounded_values import E2M1_MAX, E4M3_MAX, e2m1_rounded, e4m3_rounded
from .verify_report import Fault

# w/s is computed as w * fl(1/s), there and here: two roundings of 2^-24 each, |w/s| <= 8.5. Of two
# stages it is computed with three here, since s2 is s / s1: five in all, still less than 2^-18.
INT4_BOUND = 0.5 + 2.0**-18
# compressed-tensors 0.20 rounds w/s to the dtype of w: half an ulp of BF16 in [4, 8).
INT4_ROUNDED_QUOTIENT = 2.0**-6
# GPTQ's and AWQ's codes are those under scales that were rounded to float16 later.
LATER_ROUNDED = 2.0**-11
# w/s is computed with one rounding of the scale's inverse and one of the product, there a division.
FP4_SLACK = np.float32(2.0**-21)
# One rounding of w/s to bfloat16 before the one to FP8 is tolerated: half an ulp of 8 bits.
FP8_SLACK = 2.0**-8


# A tool that compensates moves tens of percent of the codes; one that is damaged, some.
LEAST_COMPENSATED = 1 / 50
# Codes that are one step off everywhere have 3.6 times the error of the nearest.
MOST_COMPENSATED = 2.5


class AboutNearest(Judge):
    """Codes against bounds around the weights.

    Args:
        buffers: shared with the caller, which may use "x" between two blocks.
    """

    def __init__(self, scheme: DeclaredScheme, linear: StoredLinear, buffers: Buffers) -> None:
        self.max_error = 0.0
        self._scheme = scheme
        self._linear = linear
        self._buffers = buffers
        rounded = scheme.layout.foreign_quotients_rounded(scheme)
        one_stage = rounded and scheme.first_stage is None
        wider = 2.0 ** (scheme.number.bits - 4)
        self._int4_bound = 0.5 + (INT4_BOUND - 0.5) * max(wider, 1)
        self._int4_bound += INT4_ROUNDED_QUOTIENT * wider if one_stage else 0
        if scheme.layout.zeros(scheme) is not None:
            self._int4_bound += LATER_ROUNDED * (16 * wider if scheme.asymmetric else 8 * wider)
        self._first_slack = FP8_SLACK if rounded else 0.0
        self._largest = 0.0
        self._worst = (0, 0, 0.0, 0.0)  # row, column, w/scale, code

    @override
    def add(self, block: Block) -> None:
        first_row, w, codes = block.first_row, block.w, block.codes
        x, error = (self._buffers.get(name, w.shape) for name in ("x", "error"))
        own = self._linear.scale_of(range(first_row, first_row + len(w)))
        with np.errstate(all="ignore"):  # NaN and infinity are reported as faults
            scale = spread(own, self._scheme.group_size, w.shape[1])
            first = self._linear.first_scale
            second = None if first is None else self._second_quotient(w, first, scale, codes)
            np.multiply(w, np.float32(1) / scale, out=x)
            if self._scheme.number.is_integer:
                ends = self._linear.ends(
                    self._scheme.number.bits, range(first_row, first_row + len(w))
                )
                self._int4_errors(x if second is None else second, codes, ends, error)
            elif self._scheme.number.is_fp8:
                self._fp8_errors(x, codes, error)
            else:
                self._fp4_errors(x, codes, error)
            self._judge(first_row, error, x, codes)

    def _second_quotient(
        self, w: Floats, first: np.float32, scale: Floats, codes: Floats
    ) -> Floats:
        """FP8 value / second scale, where that of both stages is `scale`; the nearest to the codes.

        One rounding of w / first scale to BF16 may decide between two neighbouring values.
        """
        low, high = (
            e4m3_rounded(w / first * np.float32(1 + slack)) * (first / scale)
            for slack in (-self._first_slack, self._first_slack)
        )
        return np.clip(codes, np.minimum(low, high), np.maximum(low, high))

    def _int4_errors(
        self, x: Floats, codes: Floats, ends: tuple[Floats | float, Floats | float], out: Floats
    ) -> None:
        """|clamp(x, -8, 7) - code| / bound, where x = w / scale; other integers have other ends."""
        np.clip(x, *ends, out=out)
        np.subtract(out, codes, out=out)
        np.abs(out, out=out)
        np.multiply(out, np.float32(1 / self._int4_bound), out=out)

    def _fp8_errors(self, x: Floats, codes: Floats, out: Floats) -> None:
        """|clamp(x, -448, 448) - code| / bound.

        Half a step of F8_E4M3 between powers of two 2^e and 2^(e+1) is 2^(e-4), at least 2^-10. It
        is taken at the smaller of |x| and |code|, so a code one step across a power of two is seen.
        """
        clamped = np.clip(x, -E4M3_MAX, E4M3_MAX, out=out)
        half_step, size = (self._buffers.get(name, out.shape) for name in ("half", "size"))
        np.abs(clamped, out=size)
        np.minimum(size, np.abs(codes, out=half_step), out=half_step)
        bits = half_step.view(np.uint32)
        np.bitwise_and(bits, np.uint32(0x7F800000), out=bits)  # 2^e: the mantissa cleared
        np.multiply(half_step, np.float32(2.0**-4), out=half_step)
        np.maximum(half_step, np.float32(2.0**-10), out=half_step)
        np.multiply(size, np.float32(FP8_SLACK), out=size)
        np.add(half_step, size, out=half_step)
        np.subtract(clamped, codes, out=out)
        np.abs(out, out=out)
        np.divide(out, half_step, out=out)

    def _fp4_errors(self, x: Floats, codes: Floats, out: Floats) -> None:
        """|clamp(x, -6, 6) - code| against the distance of the nearest of the 16 values."""
        size = np.minimum(np.abs(x), np.float32(E2M1_MAX))
        bound = np.abs(size - e2m1_rounded(size)) + FP4_SLACK * size + np.float32(2.0**-30)
        np.subtract(np.clip(x, -E2M1_MAX, E2M1_MAX), codes, out=out)
        np.divide(np.abs(out), bound, out=out)

    def _judge(self, first_row: int, error: Floats, x: Floats, codes: Floats) -> None:
        largest = float(error.max())  # NaN if any is
        if not largest <= self._largest:
            row, column = divmod(int(error.argmax()), error.shape[1])
            self.max_error = self._largest = largest
            found = float(x[row, column]), float(codes[row, column])
            self._worst = (first_row + row, column, *found)
        if not largest <= 1:
            self.wrong += int(np.count_nonzero(~(error <= 1)))

    @override
    def faults(self, name: str) -> list[Fault]:
        if not self.wrong:
            return []
        row, column, x, code = self._worst
        got = (
            f"{self.wrong} other(s), worst at row {row}, column {column}:"
            f" code {code:g} where weight/scale is {x:.6g}"
        )
        return [Fault(where=name, expected="the quantized values nearest to weight/scale", got=got)]


class NearestOrCompensated(Judge):
    """INT4 codes that are about the nearest, or make up for the errors of others as GPTQ's do.

    Where so many are others that it is no damage, they are held to their error instead.

    Args:
        nearest: tells which are not the nearest.
    """

    def __init__(self, nearest: AboutNearest, near: Near) -> None:
        self.max_error = nearest.max_error
        self._nearest, self._near = nearest, near
        self._count = 0

    @override
    def add(self, block: Block) -> None:
        before = self._nearest.wrong
        self._nearest.add(block)
        self._count += block.w.size
        if self._nearest.wrong > before:
            self._near.add(block)
        sound = self.compensated
        self.wrong = 0 if sound else self._nearest.wrong
        self.max_error = None if sound else self._nearest.max_error

    @property
    def compensated(self) -> bool:
        """True if codes are none of the nearest, and sound."""
        return self._nearest.wrong > LEAST_COMPENSATED * self._count and not self._near.faults("")

    @override
    def faults(self, name: str) -> list[Fault]:
        return [] if self.compensated else self._nearest.faults(name)


def foreign_judge(scheme: DeclaredScheme, linear: StoredLinear, buffers: Buffers) -> Judge:
    """What judges the codes of another tool."""
    about = AboutNearest(scheme, linear, buffers)
    if not scheme.number.is_integer or scheme.first_stage is not None:
        return about
    bits = scheme.number.bits
    nearest = Nearest(scheme, linear.scale, None, buffers, ends=partial(linear.ends, bits))
    size, most = scheme.group_size, MOST_COMPENSATED
    return NearestOrCompensated(about, Near(Numbers(), nearest, linear, size, buffers, most=most))
