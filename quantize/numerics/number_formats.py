"""Scales and codes of integers, FP8 and FP4, bit for bit those of Quark 0.13 and ModelOpt 0.47."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ...recipes.formats import NUMBER_FORMATS, NumberFormat, WeightDtype


def row_absmax(weight: Tensor) -> Tensor:
    """max_i |weight[o, i]|: [rows, in_features] -> [rows, 1], exact in the weight's own dtype.

    Magnitudes sort like their bit patterns, NaN above infinity; comparing integers is 25 times
    faster than comparing bfloat16.
    """
    integer = torch.int32 if weight.dtype == torch.float32 else torch.int16
    magnitudes = weight.view(integer) & torch.iinfo(integer).max  # without the sign bit
    return magnitudes.amax(dim=1, keepdim=True).view(weight.dtype)


def over(x: Tensor, divisor: float) -> Tensor:
    """The quotient rounded once; for a plain number a GPU would multiply by its reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def block_absmax(weight: Tensor, size: int) -> Tensor:
    """Largest magnitude of every square of `size` rows and columns, smaller ones at the edge.

    [rows, in_features] -> [ceil(rows / size), ceil(in_features / size)] in the weight's dtype.
    """
    columns = [row_absmax(part) for part in torch.split(weight, size, dim=1)]
    rows = [part.amax(dim=0, keepdim=True) for part in torch.split(torch.cat(columns, dim=1), size)]
    return torch.cat(rows)


FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def fp8_scale(absmax: Tensor) -> Tensor:
    """Scale = absmax / 448 in float32, of any shape; an all-zero weight gets 1."""
    scale = over(absmax.float(), FP8_MAX)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def fp8_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """Codes = e4m3(clamp(weight / scale, -448, 448)), rounded once, to nearest even.

    The division is in float32: dividing in bfloat16 first rounds twice and changes 3 % of the codes
    (ModelOpt 0.47 default export). The clamp makes the saturation explicit.
    """
    return (weight.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


INT4 = NUMBER_FORMATS["int4"]
SMALLEST_SCALE = torch.finfo(torch.float32).eps


def integer_scale(
    weight: Tensor, dtype: torch.dtype | None = None, *, number: NumberFormat = INT4
) -> Tensor:
    """Symmetric scale of integers per row: scale[o] = max_i |weight[o, i]| / ((qmax - qmin) / 2).

    INT4's divisor is 7.5, so +absmax rounds to 8 and clamps to 7; the division rounds to the
    weight's dtype. Source: Quark 0.13 `observer.calculate_int_quant_params`, equal in
    compressed-tensors. [rows, in_features] -> [rows, 1] in `dtype`, None = the weight's, at least
    2^-23.
    """
    half_range = number.largest + 0.5
    absmax = row_absmax(weight)
    if dtype is not None:  # one rounding, to that dtype
        return over(absmax.float(), half_range).clamp_(min=SMALLEST_SCALE).to(dtype)
    return over(absmax, half_range).clamp_(min=SMALLEST_SCALE)


def integer_codes(weight: Tensor, scale: Tensor, *, number: NumberFormat = INT4) -> Tensor:
    """Codes = clamp(round(weight * (1 / scale)), qmin, qmax), ties to even, in float32, as int8.

    Multiplies by the reciprocal, as Quark 0.13 does; dividing gives other codes at ties.
    """
    inv_scale = 1.0 / scale.float()
    codes = (weight * inv_scale).round_()
    return codes.clamp_(-number.largest - 1, number.largest).to(torch.int8)


SMALLEST_E4M3 = 2.0**-9
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of FP4: 2 exponent bits, 1 mantissa bit; code 8 + i is -E2M1[i]."""
FP4_MAX = E2M1[-1]
NEGATIVE_ZERO = 8
_EXPONENT, _EXPONENT_OF_ONE = 0x7F800000, 0x3F800000


def nvfp4_global_scale(absmax: Tensor) -> Tensor:
    """Scale = absmax / (6 * 448), float32, so that the largest group scale is 448.

    Source: ModelOpt 0.47 `NVFP4QTensor`. An all-zero weight gets 1 (ModelOpt: 0, then NaN).
    """
    scale = over(absmax.float(), FP4_MAX * FP8_MAX)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def nvfp4_scale(groups: Tensor, global_scale: Tensor) -> Tensor:
    """Scale = e4m3(clamp(absmax / (6 * global_scale), 2^-9, 448)); an all-zero group gets 1.

    Groups [number of groups, 16], finite, and [] float32 -> [number of groups, 1] float8_e4m3fn.
    """
    absmax = row_absmax(groups).float()
    scale = (absmax / (FP4_MAX * global_scale)).clamp_(SMALLEST_E4M3, FP8_MAX)
    return torch.where(absmax > 0, scale, torch.ones_like(scale)).to(FP8)


def mxfp4_scale(groups: Tensor) -> Tensor:
    """Scale = 2^(floor(log2(absmax')) - 2), absmax' rounded to one bit of mantissa: Quark's "even".

    Adding 2^21 to the bits of a float32 carries into the exponent from mantissa 1.75 on, so the
    largest value, at most 6 by the format, is not clamped more often than needed. The exponent is
    in [-127, 127]; an all-zero group gets the smallest, one that rounds to infinity the largest.

    Groups [number of groups, 32], finite -> [number of groups, 1] float32, powers of two.
    """
    bits = row_absmax(groups).float().view(torch.int32) + (1 << 21)
    exponent = ((bits >> 23) - 127 - 2).clamp(-127, 127)
    exponent = exponent.masked_fill(bits >> 23 == 255, 127)
    powers = torch.where(exponent < -126, 1 << 22, exponent + 127 << 23)  # 2^-127 is subnormal
    return powers.to(torch.int32).view(torch.float32)


def fp4_codes(x: Tensor) -> Tensor:
    """Nearest E2M1 codes of float32 x, ties to the even code; magnitudes above 5 give 6.

    uint8 in [0, 15], x's shape: bit 3 is set where x < 0, also if x rounds to zero.
    """
    sign = (x < 0).to(torch.uint8) * NEGATIVE_ZERO
    size = x.nan_to_num(0.0).abs_().clamp_(max=FP4_MAX)  # NaN becomes zero
    # A sum of 2^22 or more has no bits below 0.5 (2^23: below 1, 2^24: below 2): adding rounds to
    # nearest, ties to even, and leaves the number of these steps in the low byte. Codes are the
    # halves below 2, 2 + the ones below 4, and 4 + the twos: always the smallest of the three.
    halves = _low_bytes(size + 2.0**22)
    ones = _low_bytes(size + (2.0**23 + 2))
    twos = _low_bytes(size.add_(2.0**24 + 2 * 4))
    return torch.minimum(torch.minimum(halves, ones), twos) | sign


def _low_bytes(x: Tensor) -> Tensor:
    return x.view(torch.int32).to(torch.uint8)


def fp4_rounded(x: Tensor) -> Tensor:
    """The values of the nearest E2M1 codes: `fp4_values(fp4_codes(x))`, without computing codes.

    Magnitudes are 0.5 apart below 2, 1 below 4 and 2 above, and the even code of a tie is the even
    multiple of that step. float32; -0 where a negative number rounds to zero.
    """
    size = x.abs().clamp_(max=FP4_MAX)
    # 2^22 times the power of two below, and not below 1: sums have no bits below the step.
    power = (size.view(torch.int32) & _EXPONENT).clamp_(min=_EXPONENT_OF_ONE)
    large = power.add_(22 << 23).view(torch.float32)
    return size.add_(large).sub_(large).copysign_(x)


def mxfp4_codes(groups: Tensor, scale: Tensor) -> Tensor:
    """Codes = e2m1(group / scale); a negative number that rounds to zero gets the code of +0.

    Quark 0.13 `scaled_real_quantize` does so too; ModelOpt 0.47 keeps the sign (NVFP4). Groups
    [number of groups, 32], finite, and float32 scales -> uint8 in [0, 15], never 8.
    """
    codes = fp4_codes(groups / scale)
    return codes & (-(codes & 7) | 7)  # bit 3 of -1 .. -7 is set, that of 0 is not


def fp4_values(codes: Tensor) -> Tensor:
    """E2M1 codes -> their values, float32."""
    return _values_on(codes.device)[codes.long()]


@functools.cache
def _values_on(device: torch.device) -> Tensor:
    return torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)


# Groups are rows here: [number of groups, group size]. `whole` is the format's one scale of the
# whole matrix ([] float32), None where it has none.

CACHED_WEIGHTS = 2**16
"""Number of float32 weights that stay in the cache of a core from one pass to the next."""


def cached_rows(weight: Tensor) -> Iterator[slice]:
    """The rows of a weight, on a CPU a few at a time: that halves the time of arithmetic."""
    on_cpu = weight.device.type == "cpu"
    step = max(1, CACHED_WEIGHTS // max(1, weight.shape[1]) if on_cpu else len(weight))
    return (slice(first, first + step) for first in range(0, len(weight), step))


def whole_scale(dtype: WeightDtype, absmax: Tensor) -> Tensor | None:
    """The scale over all others, from the largest magnitude that it must cover, one element."""
    return nvfp4_global_scale(absmax).reshape(()) if NUMBER_FORMATS[dtype].global_scale else None


def absmax_scale(
    dtype: WeightDtype, rows: Tensor, whole: Tensor | None, scale_dtype: torch.dtype | None
) -> Tensor:
    """Scales [rows, 1] under which the largest magnitude of each row fits."""
    number = NUMBER_FORMATS[dtype]
    if number.is_integer:
        return integer_scale(rows, scale_dtype, number=number)
    if number.is_fp8:
        return fp8_scale(row_absmax(rows))
    return mxfp4_scale(rows) if whole is None else nvfp4_scale(rows, whole)


def nearest_codes(dtype: WeightDtype, rows: Tensor, scale: Tensor, whole: Tensor | None) -> Tensor:
    """The codes nearest to rows / scale, [rows, in_features]; dtypes as in `QuantizedWeight`."""
    number = NUMBER_FORMATS[dtype]
    if number.is_integer:
        return integer_codes(rows, scale, number=number)
    if number.is_fp8:
        return fp8_codes(rows, scale)
    if number.powers_of_two:
        return mxfp4_codes(rows, scale)
    return fp4_codes(rows / served_scale(scale, whole))


def nearest_values(dtype: WeightDtype, rows: Tensor, served: Tensor) -> Tensor:
    """The values of `nearest_codes` under a scale of 1, except for signs of zero; a new tensor.

    `rows` [rows, in_features] and `served` [rows, 1], which multiplies codes, are float32, finite.
    """
    number = NUMBER_FORMATS[dtype]
    if number.is_fp8:
        return fp8_codes(rows, served).float()
    return rounded_values(dtype, rows * (1.0 / served) if number.is_integer else rows / served)


def rounded_values(dtype: WeightDtype, x: Tensor) -> Tensor:
    """The values of the codes nearest to x under a scale of 1, float32, for integers and FP4."""
    number = NUMBER_FORMATS[dtype]
    if number.is_integer:
        return x.round().clamp_(-number.largest - 1, number.largest)
    return fp4_rounded(x)


def storable_scale(dtype: WeightDtype, scale: Tensor, stored: torch.dtype) -> Tensor:
    """The nearest that can be stored: of integers at least 2^-23, of NVFP4 an FP8 number > 0."""
    if not NUMBER_FORMATS[dtype].global_scale:
        return scale.clamp(min=SMALLEST_SCALE).to(stored)
    return scale.clamp(SMALLEST_E4M3, FP8_MAX).to(stored)


def served_scale(scale: Tensor, whole: Tensor | None) -> Tensor:
    """The factor of the codes, float32."""
    return scale.float() if whole is None else scale.float() * whole
