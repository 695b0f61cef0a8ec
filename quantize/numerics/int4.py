"""INT4: symmetric codes -8 .. 7 under one scale per row, by the rule of AMD Quark 0.13.

Bit for bit: the differential tests hold it against the toolkit itself.
"""

import torch
from torch import Tensor

from .absmax import over, row_absmax

INT4_MIN, INT4_MAX = -8, 7
SMALLEST_SCALE = torch.finfo(torch.float32).eps


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
        return over(absmax.float(), half_range).clamp_(min=SMALLEST_SCALE).to(dtype)
    return over(absmax, half_range).clamp_(min=SMALLEST_SCALE)


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
