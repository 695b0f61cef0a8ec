"""Scales and codes of rows or groups of weights, one function each for every number format.

Groups are rows here: [number of groups, group size]. What a format has beside its scales, one scale
of the whole matrix, is `whole` ([] float32, None where it has none).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...recipes.formats import NUMBER_FORMATS, WeightDtype
from .absmax import row_absmax
from .fp4 import (
    SMALLEST_E4M3,
    fp4_codes,
    fp4_rounded,
    mxfp4_codes,
    mxfp4_scale,
    nvfp4_global_scale,
    nvfp4_scale,
)
from .fp8 import FP8_MAX, fp8_codes, fp8_scale
from .int4 import INT4_MAX, INT4_MIN, SMALLEST_SCALE, int4_codes, int4_scale

CACHED_WEIGHTS = 2**16
"""So many float32 copies of weights stay in the cache of a core from one pass to the next."""


def cached_rows(weight: Tensor) -> Iterator[slice]:
    """The rows of a weight, on a CPU a few at a time: arithmetic takes half as long then."""
    on_cpu = weight.device.type == "cpu"
    step = max(1, CACHED_WEIGHTS // max(1, weight.shape[1]) if on_cpu else len(weight))
    return (slice(first, first + step) for first in range(0, len(weight), step))


def whole_scale(dtype: WeightDtype, absmax: Tensor) -> Tensor | None:
    """The scale over all others, from the largest magnitude that it must cover, one element."""
    return nvfp4_global_scale(absmax).reshape(()) if NUMBER_FORMATS[dtype].global_scale else None


def absmax_scale(
    dtype: WeightDtype, rows: Tensor, whole: Tensor | None, scale_dtype: torch.dtype | None
) -> Tensor:
    """Scales [rows, 1] under which the largest magnitude of each row fits.

    Args:
        rows: [rows, in_features], finite.
        scale_dtype: of INT4 scales; None = that of the weight.
    """
    number = NUMBER_FORMATS[dtype]
    if number.is_integer:
        return int4_scale(rows, scale_dtype)
    if number.is_fp8:
        return fp8_scale(row_absmax(rows))
    return mxfp4_scale(rows) if whole is None else nvfp4_scale(rows, whole)


def nearest_codes(dtype: WeightDtype, rows: Tensor, scale: Tensor, whole: Tensor | None) -> Tensor:
    """The codes nearest to rows / scale, [rows, in_features]; dtypes as in `QuantizedWeight`."""
    number = NUMBER_FORMATS[dtype]
    if number.is_integer:
        return int4_codes(rows, scale)
    if number.is_fp8:
        return fp8_codes(rows, scale)
    if number.powers_of_two:
        return mxfp4_codes(rows, scale)
    return fp4_codes(rows.float() / served_scale(scale, whole))


def nearest_values(dtype: WeightDtype, rows: Tensor, served: Tensor) -> Tensor:
    """The values of `nearest_codes` under a scale of 1, but for signs of zero; a new tensor.

    Args:
        rows: [rows, in_features] float32, finite.
        served: what multiplies the codes, [rows, 1] float32.
    """
    number = NUMBER_FORMATS[dtype]
    if number.is_fp8:
        return fp8_codes(rows, served).float()
    return rounded_values(dtype, rows * (1.0 / served) if number.is_integer else rows / served)


def rounded_values(dtype: WeightDtype, x: Tensor) -> Tensor:
    """The values of the codes nearest to x under a scale of 1, float32, for INT4 and FP4.

    Args:
        x: float32, any device.
    """
    return (
        x.round().clamp_(INT4_MIN, INT4_MAX) if NUMBER_FORMATS[dtype].is_integer else fp4_rounded(x)
    )


def storable_scale(dtype: WeightDtype, scale: Tensor, stored: torch.dtype) -> Tensor:
    """The nearest scale that is stored: of INT4 not below 2^-23, of NVFP4 one of FP8, above zero.

    Args:
        dtype: of the codes, int4 or nvfp4.
        scale: float32; of NVFP4 without the scale of the whole matrix.
        stored: dtype of the result.
    """
    if not NUMBER_FORMATS[dtype].global_scale:
        return scale.clamp(min=SMALLEST_SCALE).to(stored)
    return scale.clamp(SMALLEST_E4M3, FP8_MAX).to(stored)


def served_scale(scale: Tensor, whole: Tensor | None) -> Tensor:
    """What multiplies the codes, float32."""
    return scale.float() if whole is None else scale.float() * whole
