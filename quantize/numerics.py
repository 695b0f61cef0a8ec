"""Numerics: from a weight to codes and scales, in torch. Knows tensors, not names or files.

The rules are those of AMD Quark 0.13 for INT4 and correctly rounded FP8, bit for bit; the
differential tests hold them against the real toolkits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
INT4_MIN, INT4_MAX = -8, 7
SMALLEST_SCALE = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight or a block of its rows as codes and scales: w ≈ codes * scale.

    Attributes:
        codes: [rows, in_features], int8 in [-8, 7] (INT4) or float8_e4m3fn.
        scale: [rows, 1] (channel) or [1, 1] (tensor); INT4: the weight's dtype, FP8: float32.
    """

    codes: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """Codes * scale in float32, [rows, in_features]."""
        return self.codes.float() * self.scale.float()


def row_absmax(weight: Tensor) -> Tensor:
    """max_i |weight[o, i]|: [rows, in_features] -> [rows, 1], exact in the weight's own dtype.

    Magnitudes sort like their bit patterns, NaN above infinity; comparing integers is 25 times
    faster than comparing bfloat16.
    """
    integer = torch.int32 if weight.dtype == torch.float32 else torch.int16
    magnitudes = weight.view(integer) & torch.iinfo(integer).max  # without the sign bit
    return magnitudes.amax(dim=1, keepdim=True).view(weight.dtype)


def int4_scale(weight: Tensor) -> Tensor:
    """Symmetric INT4 scale per row: scale[o] = max_i |weight[o, i]| / ((qmax - qmin) / 2).

    The divisor is 7.5, so +absmax rounds to 8 and clamps to 7; the division rounds to the weight's
    dtype. Source: Quark 0.13 `observer.calculate_int_quant_params`, equal in compressed-tensors.

    Args:
        weight: [rows, in_features], bfloat16, float16 or float32, finite.

    Returns:
        [rows, 1] in the weight's dtype, at least 2^-23 (an all-zero row gets 2^-23).
    """
    half_range = (INT4_MAX - INT4_MIN) / 2
    scale = row_absmax(weight) / half_range
    return scale.maximum(torch.tensor(SMALLEST_SCALE, dtype=weight.dtype))


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
