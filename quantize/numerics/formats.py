"""Numerics: from a weight to codes and scales, in torch. Knows tensors, not names or files.

The rules are those of AMD Quark 0.13 for INT4 and MXFP4, of NVIDIA ModelOpt 0.47 for NVFP4, and
correctly rounded FP8, bit for bit; the differential tests hold them against the real toolkits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SMALLEST_E4M3 = 2.0**-9
INT4_MIN, INT4_MAX = -8, 7
SMALLEST_SCALE = torch.finfo(torch.float32).eps
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of FP4: 2 exponent bits, 1 mantissa bit; code 8 + i is -E2M1[i]."""
FP4_MAX = E2M1[-1]
NEGATIVE_ZERO = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight or a block of its rows as codes and scales: w ≈ codes * scale * global_scale.

    Attributes:
        codes: [rows, in_features]: int8 in [-8, 7] (int4), float8_e4m3fn (fp8_e4m3), or uint8 in
            [0, 15], a sign bit and a magnitude of `E2M1` (nvfp4, mxfp4).
        scale: one element per [rows / R, in_features / C] part of the weight: [rows, 1] (channel),
            [1, 1] (tensor), [rows, groups] (group), [row blocks, column blocks] (block). int4: the
            weight's dtype or that of the recipe; fp8_e4m3: float32; nvfp4: float8_e4m3fn; mxfp4:
            float32 powers of two.
        global_scale: [] float32 (nvfp4, and the first stage of two), else None.
        group_size: inputs (and rows, for blocks) that share a scale; None for channel and tensor.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None = None
    group_size: int | None = None

    def dequantized(self) -> Tensor:
        """Codes * scale in float32, [rows, in_features]."""
        rows, columns = self.codes.shape
        scale = self.scale.float()
        if self.group_size is not None:
            scale = scale.repeat_interleave(self.group_size, dim=1)[:, :columns]
            if scale.shape[0] != rows:
                scale = scale.repeat_interleave(self.group_size, dim=0)[:rows]
        if self.global_scale is not None:
            scale = scale * self.global_scale
        values = fp4_values(self.codes) if self.codes.dtype == torch.uint8 else self.codes.float()
        return values * scale


def row_absmax(weight: Tensor) -> Tensor:
    """max_i |weight[o, i]|: [rows, in_features] -> [rows, 1], exact in the weight's own dtype.

    Magnitudes sort like their bit patterns, NaN above infinity; comparing integers is 25 times
    faster than comparing bfloat16.
    """
    integer = torch.int32 if weight.dtype == torch.float32 else torch.int16
    magnitudes = weight.view(integer) & torch.iinfo(integer).max  # without the sign bit
    return magnitudes.amax(dim=1, keepdim=True).view(weight.dtype)


def int4_scale(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Symmetric INT4 scale per row: scale[o] = max_i |weight[o, i]| / ((qmax - qmin) / 2).

    The divisor is 7.5, so +absmax rounds to 8 and clamps to 7; the division rounds to the weight's
    dtype. Source: Quark 0.13 `observer.calculate_int_quant_params`, equal in compressed-tensors.

    Args:
        weight: [rows, in_features], bfloat16, float16 or float32, finite.
        dtype: of the scale; None = the weight's, as Quark does by default.

    Returns:
        [rows, 1] in that dtype, at least 2^-23 (an all-zero row gets 2^-23).
    """
    half_range = (INT4_MAX - INT4_MIN) / 2
    absmax = row_absmax(weight)
    if dtype is not None:  # one rounding, to that dtype
        return (absmax.float() / half_range).clamp_(min=SMALLEST_SCALE).to(dtype)
    return (absmax / half_range).maximum(torch.tensor(SMALLEST_SCALE, dtype=weight.dtype))


def int4_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """Codes = clamp(round(weight * (1 / scale)), -8, 7), ties to even, in float32.

    Multiplies by the reciprocal, as Quark 0.13 does; dividing gives other codes at ties.

    Args:
        weight: [rows, in_features].
        scale: [rows, 1].

    Returns:
        [rows, in_features] int8.
    """
    inv_scale = 1.0 / scale.float()
    return (weight * inv_scale).round_().clamp_(INT4_MIN, INT4_MAX).to(torch.int8)


def fp8_scale(absmax: Tensor) -> Tensor:
    """Scale = absmax / 448 in float32; an all-zero weight gets 1, so that nothing divides by zero.

    Args:
        absmax: any shape, the largest magnitude that the scale must cover.

    Returns:
        float32, the same shape, positive.
    """
    scale = absmax.float() / FP8_MAX
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def fp8_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """Codes = e4m3(clamp(weight / scale, -448, 448)), rounded once, to nearest even.

    The division is in float32: dividing in bfloat16 first rounds twice and changes 3 % of the codes
    (ModelOpt 0.47 default export). The clamp makes the saturation explicit.

    Args:
        weight: [rows, in_features], finite.
        scale: float32, broadcastable.

    Returns:
        [rows, in_features] float8_e4m3fn.
    """
    return (weight.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def fp8_rounded(x: Tensor, scale: Tensor) -> Tensor:
    """X rounded to FP8 and back, in x's dtype: what a W8A8 kernel sees of an activation."""
    return (fp8_codes(x, scale).float() * scale).to(x.dtype)


def block_absmax(weight: Tensor, size: int) -> Tensor:
    """Largest magnitude of every square of `size` rows and columns; those at the edge are smaller.

    Args:
        weight: [rows, in_features].
        size: rows and columns of a square.

    Returns:
        [ceil(rows / size), ceil(in_features / size)] in the weight's dtype.
    """
    columns = [row_absmax(part) for part in torch.split(weight, size, dim=1)]
    rows = [part.amax(dim=0, keepdim=True) for part in torch.split(torch.cat(columns, dim=1), size)]
    return torch.cat(rows)


def nvfp4_global_scale(absmax: Tensor) -> Tensor:
    """Scale = absmax / (6 * 448), float32: so that the largest group scale is 448.

    Source: ModelOpt 0.47 `NVFP4QTensor`. An all-zero weight gets 1 (ModelOpt: 0, then NaN).
    """
    scale = absmax.float() / (FP4_MAX * FP8_MAX)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def nvfp4_scale(groups: Tensor, global_scale: Tensor) -> Tensor:
    """Scale = e4m3(clamp(absmax / (6 * global_scale), 2^-9, 448)); an all-zero group gets 1.

    Args:
        groups: [number of groups, 16], finite.
        global_scale: [] float32.

    Returns:
        [number of groups, 1] float8_e4m3fn.
    """
    absmax = row_absmax(groups).float()
    scale = (absmax / (FP4_MAX * global_scale)).clamp_(SMALLEST_E4M3, FP8_MAX)
    return torch.where(absmax > 0, scale, torch.ones_like(scale)).to(FP8)


def mxfp4_scale(groups: Tensor) -> Tensor:
    """Scale = 2^(floor(log2(absmax')) - 2), absmax' rounded to one bit of mantissa: Quark's "even".

    Adding 2^21 to the bits of a float32 carries into the exponent from mantissa 1.75 on: so the
    largest value, at most 6 by the format, is not clamped more often than needed. The exponent lies
    in [-127, 127]; an all-zero group gets the smallest, one that rounds to infinity the largest.

    Args:
        groups: [number of groups, 32], finite.

    Returns:
        [number of groups, 1] float32, powers of two.
    """
    bits = row_absmax(groups).float().view(torch.int32) + (1 << 21)
    exponent = ((bits >> 23) - 127 - 2).clamp(-127, 127)
    exponent = exponent.masked_fill(bits >> 23 == 255, 127)
    return torch.ldexp(torch.ones(exponent.shape), exponent)


def fp4_codes(x: Tensor) -> Tensor:
    """Nearest E2M1 codes of x, ties to the even code; magnitudes above 5 give 6.

    Args:
        x: float32, weights divided by their scales.

    Returns:
        uint8 in [0, 15], x's shape: bit 3 is set where x < 0, also if x rounds to zero.
    """
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    for boundary, tie_goes_up in ((0.75, True), (1.25, False), (1.75, True),
                                  (2.5, False), (3.5, True), (5.0, False)):  # fmt: skip
        code += size >= boundary if tie_goes_up else size > boundary
    return code | ((x < 0).to(torch.uint8) << 3)


def mxfp4_codes(groups: Tensor, scale: Tensor) -> Tensor:
    """Codes = e2m1(group / scale); a negative number that rounds to zero gets the code of +0.

    So does Quark 0.13 `scaled_real_quantize`; ModelOpt 0.47 keeps the sign (NVFP4).

    Args:
        groups: [number of groups, 32], finite.
        scale: [number of groups, 1] float32.

    Returns:
        [number of groups, 32] uint8 in [0, 15], never 8.
    """
    codes = fp4_codes(groups.float() / scale)
    return codes.masked_fill_(codes == NEGATIVE_ZERO, 0)


def fp4_values(codes: Tensor) -> Tensor:
    """E2M1 codes -> their values, float32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    return table[codes.long()]
