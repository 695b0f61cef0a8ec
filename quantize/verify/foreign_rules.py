"""Codes and scales of other tools: nearest, and absmax, except for the roundings of these tools.

Each weight / scale may lie slightly more than half a step from its code; the bounds are here.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import Floats, stored_scalar
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.linear import (
    INVERSE_SCALE,
    StoredLinear,
    global_scale,
    matrix_scale,
    spread,
    stored_scales,
)
from .code_judges import Block, Buffers, Judge, Near, Nearest
from .comparison import Fault, others
from .scales import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_SMALLEST,
    INTEGER_SMALLEST_SCALE,
    e2m1_rounded,
    e4m3_rounded,
    whole_steps,
)

# w/s is computed as w * fl(1/s), there and here: two roundings of 2^-24 each, |w/s| <= 8.5. With
# two stages it takes three here, since s2 is s / s1: five in all, still less than 2^-18.
INT4_BOUND = 0.5 + 2.0**-18
# compressed-tensors 0.20 rounds w/s to the dtype of w: half an ulp of BF16 in [4, 8).
INT4_ROUNDED_QUOTIENT = 2.0**-6
# Codes of GPTQ and AWQ were taken under scales that were rounded to float16 later.
LATER_ROUNDED = 2.0**-11
# There, w/s has one rounding of the scale's inverse and one of the product; here it is a division.
FP4_SLACK = np.float32(2.0**-21)
# One rounding of w/s to bfloat16 before that to FP8 is tolerated: half an ulp of 8 bits.
FP8_SLACK = 2.0**-8
# A tool that compensates moves tens of percent of the codes; damage moves some.
LEAST_COMPENSATED = 1 / 50
# Codes that are one step off everywhere have 3.6 times the error of the nearest ones.
MOST_COMPENSATED = 2.5
MOST_BEYOND_COMPENSATED = 1.5
"""GPTQ chooses the scales of a group after it has compensated the columns before it."""
INT4_HALF_RANGE = np.float32(7.5)
INT4_LEAST_OF_ABSMAX = 1 / 4
"""Searched scales clip the largest weights; below this, rows are cut off, not clipped."""
_ODD_ONES = 1 / 8
"""If fewer scales than this break a rule, they are damaged, not searched."""
POWERS_OF_TWO = "ue8m0"
"""What a declaration calls FP8 scales that are rounded up to a power of two."""
# scale = absmax / divisor, rounded to the scale's dtype: half an ulp, and one float32 division.
_SLACK = {"BF16": 2.0**-8, "F16": 2.0**-10, "F32": 2.0**-8, "F8_E8M0": 0.0}
_BF16_HALF_STEP = 2.0**-8
_GLOBAL_SLACK = 2.0**-20  # a few float32 roundings, and those of an inverse
_F16_SMALLEST_STEP = 2.0**-24
# Half a step of F8_E4M3, relative above 2^-6 and absolute below, and float32 roundings.
_E4M3_HALF_STEP, _E4M3_SUBNORMAL_HALF_STEP = 2.0**-4 + 2.0**-20, 2.0**-10 + 2.0**-20
Doubles = npt.NDArray[np.float64]


class AboutNearest(Judge):
    """Codes against bounds around the weights; `buffers` as in `Nearest`."""

    def __init__(self, scheme: DeclaredScheme, linear: StoredLinear, buffers: Buffers) -> None:
        self.max_error = 0.0
        self._scheme, self._linear, self._buffers = scheme, linear, buffers
        rounded = scheme.layout.foreign_quotients_rounded(scheme)
        one_stage = rounded and scheme.first_stage is None
        wider = 2.0 ** (scheme.number.bits - 4)
        self._int4_bound = 0.5 + (INT4_BOUND - 0.5) * max(wider, 1)
        self._int4_bound += INT4_ROUNDED_QUOTIENT * wider if one_stage else 0
        if scheme.layout.zeros(scheme) is not None:
            self._int4_bound += LATER_ROUNDED * (16 * wider if scheme.asymmetric else 8 * wider)
        self._first_slack = FP8_SLACK if rounded else 0.0
        self._largest = 0.0
        self._worst: tuple[int, int, float, float]  # row, column, w/scale, code

    @override
    def add(self, block: Block) -> None:
        w, codes, number = block.w, block.codes, self._scheme.number
        rows = range(block.first_row, block.first_row + len(w))
        x, error = (self._buffers.get(name, w.shape) for name in ("x", "error"))
        with np.errstate(all="ignore"):  # NaN and infinity are reported as faults
            scale = spread(self._linear.scale_of(rows), self._scheme.group_size, w.shape[1])
            first = self._linear.first_scale
            second = None if first is None else self._second_stage(w, first, scale, codes)
            np.multiply(w, np.float32(1) / scale, out=x)
            bound: Floats | None = None
            if number.is_integer:
                ends = self._linear.ends(number.bits, rows)
                np.clip(x if second is None else second, *ends, out=error)
            else:
                largest = E4M3_MAX if number.is_fp8 else E2M1_MAX
                np.clip(x, -largest, largest, out=error)
                bound = self._fp8_bound(error, codes) if number.is_fp8 else _fp4_bound(error)
            np.abs(np.subtract(error, codes, out=error), out=error)
            if bound is None:
                np.multiply(error, np.float32(1 / self._int4_bound), out=error)
            else:
                np.divide(error, bound, out=error)
            self._judge(block.first_row, error, x, codes)

    def _second_stage(self, w: Floats, first: np.float32, scale: Floats, codes: Floats) -> Floats:
        """FP8 value / second scale; `scale` is the product of both stages. Nearest to the codes.

        One rounding of w / first scale to BF16 may decide between two neighbouring values.
        """
        low, high = (
            e4m3_rounded(w / first * np.float32(1 + slack)) * (first / scale)
            for slack in (-self._first_slack, self._first_slack)
        )
        return np.clip(codes, np.minimum(low, high), np.maximum(low, high))

    def _fp8_bound(self, x: Floats, codes: Floats) -> Floats:
        """Half a step of F8_E4M3 between powers of two 2^e and 2^(e+1): 2^(e-4), at least 2^-10.

        The smaller of |x| and |code| decides: a code one step across a power of two is found.
        """
        half_step, size = (self._buffers.get(name, x.shape) for name in ("half", "size"))
        np.abs(x, out=size)
        np.minimum(size, np.abs(codes, out=half_step), out=half_step)
        bits = half_step.view(np.uint32)
        np.bitwise_and(bits, np.uint32(0x7F800000), out=bits)  # 2^e: the mantissa cleared
        np.multiply(half_step, np.float32(2.0**-4), out=half_step)
        np.maximum(half_step, np.float32(2.0**-10), out=half_step)
        np.multiply(size, np.float32(FP8_SLACK), out=size)
        return np.add(half_step, size, out=half_step)

    def _judge(self, first_row: int, error: Floats, x: Floats, codes: Floats) -> None:
        largest = float(error.max())  # NaN if any is
        if not largest <= self._largest:
            row, column = divmod(int(error.argmax()), error.shape[1])
            self.max_error = self._largest = largest
            values = float(x[row, column]), float(codes[row, column])
            self._worst = (first_row + row, column, *values)
        if not largest <= 1:
            self.wrong += int(np.count_nonzero(~(error <= 1)))

    @override
    def faults(self, name: str) -> list[Fault]:
        if not self.wrong:
            return []
        row, column, x, code = self._worst
        what = f"code {code:g} where weight/scale is {x:.6g}"
        got = f"{self.wrong} other(s), worst at row {row}, column {column}: {what}"
        return [Fault(name, "the quantized values nearest to weight/scale", got)]


def _fp4_bound(x: Floats) -> Floats:
    """The distance to the nearest of the 16 values."""
    size = np.abs(x)
    return np.abs(size - e2m1_rounded(size)) + FP4_SLACK * size + np.float32(2.0**-30)


class NearestOrCompensated(Judge):
    """INT4 codes that are about the nearest, or compensate the errors of others as GPTQ's do.

    Where too many differ for damage, their error is judged instead.
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
        """True if codes are not the nearest, but sound."""
        return self._nearest.wrong > LEAST_COMPENSATED * self._count and not self._near.faults("")

    @override
    def faults(self, name: str) -> list[Fault]:
        return [] if self.compensated else self._nearest.faults(name)


def foreign_judge(scheme: DeclaredScheme, linear: StoredLinear, buffers: Buffers) -> Judge:
    """The judge of another tool's codes."""
    about = AboutNearest(scheme, linear, buffers)
    if not scheme.number.is_integer or scheme.first_stage is not None:
        return about
    bits = scheme.number.bits
    nearest = Nearest(scheme, linear.scale, None, buffers, ends=partial(linear.ends, bits))
    size, most = scheme.group_size, MOST_COMPENSATED
    return NearestOrCompensated(about, Near(nearest, linear, size, buffers, most=most))


def about_absmax_faults(
    output: Checkpoint,
    scheme: DeclaredScheme,
    module: str,
    scale: Floats,
    absmax: Floats,
    *,
    compensated: bool,
) -> list[Fault]:
    """Scales [out_features, groups] that absmax does not give; all-zero FP8 and FP4 may have any.

    Not for the one scale of a matrix; `compensated` codes make up for the errors of others.
    """
    name = f"{module}.{scheme.layout.scale_suffix(scheme)}"
    dtype, largest = output.tensors[name].dtype, absmax.astype(np.float64)
    if scheme.granularity == "block":
        size = scheme.rows_of_scale
        blocks = np.maximum.reduceat(largest, np.arange(0, len(largest), size), axis=0)
        largest = np.repeat(blocks, size, axis=0)[: len(largest)]
    wide = scale.astype(np.float64)
    wide = np.abs(wide) if scheme.has_signed_scales else wide
    if scheme.number.global_scale or scheme.first_stage:
        stored = stored_scales(output, scheme, module).astype(np.float64)
        whole = float(global_scale(output, module))
        if scheme.first_stage:
            return _second_stage_faults(name, stored, largest / whole, _SLACK[dtype])
        return _nvfp4_faults(name, stored, whole, largest)
    if scheme.number.powers_of_two:
        # The largest weight lies in [3.5, 7) scales: exponents come from one rounded mantissa bit.
        ratio = largest / wide
        wrong = ~((ratio >= 3.5) & (ratio < 7)) & (largest > 0) & (wide > 2.0**-127)
        return _faults(name, wrong, wide, largest / 4, "2^(floor(log2(absmax)) - 2), rounded")
    if scheme.number.is_integer:
        return _integer_faults(output.tensors[name], scheme, wide, largest, compensated=compensated)
    expected = largest / E4M3_MAX
    wrong = ~_fits(wide, expected, dtype) & (largest > 0)
    if scheme.version == POWERS_OF_TWO:
        next_power = (np.frexp(wide)[0] == 0.5) & (wide >= expected) & (wide < 2 * expected)
        wrong &= ~next_power
    return _faults(name, wrong, wide, expected, f"absmax / {E4M3_MAX:g}")


def integer_scale_rule(
    tensor: TensorInfo, scheme: DeclaredScheme, scale: Floats, absmax: Floats
) -> str:
    """The rule of the scales of integer codes, in words; for searched ones, their range."""
    scale = np.abs(scale)
    sides = scale.astype(np.float64), absmax.astype(np.float64)
    divisor, wrong, _ = _integer_rule(tensor, scheme, *sides)
    if not wrong.any() and not scheme.asymmetric:
        return f"absmax / {divisor:g}"
    half_range = _divisors(scheme)[0]
    share = scale[absmax > 0] * half_range / absmax[absmax > 0]
    how = "of ranges" if scheme.asymmetric else "searched"
    ends = f"{share.min():.2f} to {share.max():.2f}" if share.size else "any"
    return f"{how}, {ends} of absmax / {half_range:g}"


def _divisors(scheme: DeclaredScheme) -> tuple[float, float, float]:
    """Half the range (Quark, compressed-tensors), largest (AutoAWQ, GPTQ, ModelOpt), smallest."""
    half = 2.0 ** (scheme.number.bits - 1)
    return half - 0.5, half - 1, half


def _integer_faults(
    tensor: TensorInfo,
    scheme: DeclaredScheme,
    scale: Doubles,
    absmax: Doubles,
    *,
    compensated: bool,
) -> list[Fault]:
    """Faults unless scales follow one of the rules, or are searched and stay in range.

    Scales from the range of weights are half of these where all weights have one sign.
    """
    divisor, wrong, expected = _integer_rule(tensor, scheme, scale, absmax)
    if wrong.mean() < _ODD_ONES and not scheme.asymmetric:
        return _faults(tensor.name, wrong, scale, expected, f"absmax / {divisor:g}")
    _, fewest, many = _divisors(scheme)
    beyond = MOST_BEYOND_COMPENSATED if compensated else 1.0
    most = np.maximum(absmax / fewest * beyond, INTEGER_SMALLEST_SCALE)
    least = absmax / (2 * many if scheme.asymmetric else many) * INT4_LEAST_OF_ABSMAX
    slack = 2 * _SLACK[tensor.dtype]
    wrong = ~((scale <= most * (1 + slack)) & (scale >= least)) & (absmax > 0)
    what = f"1/4 to {beyond:g} of absmax / {fewest:g}"
    return _faults(tensor.name, wrong, scale, most, what)


def _integer_rule(
    tensor: TensorInfo, scheme: DeclaredScheme, scale: Doubles, absmax: Doubles
) -> tuple[float, npt.NDArray[np.bool_], Doubles]:
    """The divisor that most scales have, the scales that differ, and what they should be."""
    candidates = []
    for divisor in _divisors(scheme):
        expected = np.maximum(absmax / divisor, INTEGER_SMALLEST_SCALE)
        candidates.append((divisor, ~_fits(scale, expected, tensor.dtype), expected))
    return min(candidates, key=lambda candidate: int(candidate[1].sum()))


def _fits(scale: Doubles, expected: Doubles, dtype: str) -> npt.NDArray[np.bool_]:
    slack = expected * _SLACK[dtype] + (_F16_SMALLEST_STEP if dtype == "F16" else 0)
    fits: npt.NDArray[np.bool_] = np.abs(scale - expected) <= slack
    return fits


def _nvfp4_faults(name: str, stored: Doubles, whole: float, absmax: Doubles) -> list[Fault]:
    """Group scale = e4m3(absmax / (6 * global scale))."""
    expected = np.clip(absmax / (E2M1_MAX * whole), E4M3_SMALLEST, E4M3_MAX)
    slack = np.maximum(expected * _E4M3_HALF_STEP, _E4M3_SUBNORMAL_HALF_STEP)
    wrong = ~(np.abs(stored - expected) <= slack) & (absmax > 0)
    return _faults(name, wrong, stored, expected, "absmax / (6 * global scale)")


def _second_stage_faults(name: str, wide: Doubles, quotient: Doubles, slack: float) -> list[Fault]:
    """Scale = absmax / 7.5 of the FP8 values of a row: rounding keeps the largest the largest.

    Other tools round weight / first scale to BF16 before they round it to FP8.
    """
    least, expected, most = (
        np.maximum(
            e4m3_rounded((quotient * factor).astype(np.float32)) / INT4_HALF_RANGE,
            INTEGER_SMALLEST_SCALE,
        ).astype(np.float64)
        for factor in (1 - _BF16_HALF_STEP, 1.0, 1 + _BF16_HALF_STEP)
    )
    wrong = ~((wide >= least * (1 - slack)) & (wide <= most * (1 + slack)))
    return _faults(name, wrong, wide, expected, "absmax of the FP8 values / 7.5")


def about_matrix_scale_faults(
    output: Checkpoint, scheme: DeclaredScheme, absmax: Mapping[str, float]
) -> list[Fault]:
    """The one scale of each matrix of a fused group: from its largest magnitude, or its own.

    Other tools take one from each weight alone; `absmax` has those of the source, by module.
    """
    divisor, shared = whole_steps(scheme), max(absmax.values())
    faults = []
    for module, alone in absmax.items():
        tensor = matrix_scale(output, module)
        scale = stored_scalar(output, tensor)
        scale = 1 / scale if tensor.name.endswith(INVERSE_SCALE) else scale
        slack = _GLOBAL_SLACK if scheme.number.global_scale else _SLACK[tensor.dtype]
        allowed = [largest / divisor for largest in (shared, alone)]
        if not any(abs(scale - value) <= value * slack or value == 0 for value in allowed):
            of = f" of {', '.join(absmax)}" if len(absmax) > 1 else ""
            wanted = f"absmax{of} / {divisor:g} ({allowed[0]:.6g})"
            faults.append(Fault(tensor.name, wanted, f"{scale:.6g}"))
    return faults


def _faults(
    name: str, wrong: npt.NDArray[np.bool_], scale: Doubles, expected: Doubles, rule: str
) -> list[Fault]:
    wanted = f"{expected[wrong][0]:.6g}" if wrong.any() else ""
    say = "first {:.6g} at row {}".format
    return others(name, f"{rule} ({wanted})", wrong, lambda at: say(scale[at], at[0]))
