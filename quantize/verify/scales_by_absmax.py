"""The scales that the largest magnitudes give, computed once more: bit for bit what is written.

Every rule is one float32 division and one rounding to what is stored. All-zero weights get a
constant scale, so that nothing divides by zero.
"""

from fractions import Fraction

import numpy as np

from ..files.safetensors_header import FloatDtype
from ..stored.declarations import DeclaredScheme
from ..stored.decoded_numbers import Floats
from .rounded_values import E2M1_MAX, E4M3_MAX, e4m3_rounded, rounded_values

INT4_HALF_RANGE = np.float32(7.5)
INT4_SMALLEST_SCALE = np.float32(2.0**-23)
E4M3_SMALLEST = np.float32(2.0**-9)
E8M0_SMALLEST = np.float32(2.0**-127)
QUARTER = Fraction(1, 4)
"""Of the absmax scale: where searches end below."""
_FLOATS: dict[str, FloatDtype] = {"BF16": "BF16", "F16": "F16", "F32": "F32"}


def whole_steps(scheme: DeclaredScheme) -> float:
    """What the largest magnitude of a matrix is divided by: the largest code; NVFP4: times 448."""
    return E2M1_MAX * E4M3_MAX if scheme.number.global_scale else E4M3_MAX


def whole_scale(scheme: DeclaredScheme, largest: np.float32) -> np.float32:
    """The one scale of a matrix: of FP8, of a first stage, or over NVFP4's groups.

    Args:
        largest: magnitude that it must cover, of the matrix and of those fused with it.
    """
    scale = largest / np.float32(whole_steps(scheme))
    return scale if scale > 0 else np.float32(1)


def absmax_scales(
    largest: Floats, scheme: DeclaredScheme, dtype: str, whole: np.float32 | None
) -> Floats:
    """The scales of rows, groups or blocks, in the shape of `largest`.

    Args:
        largest: magnitude that each must cover.
        dtype: in which the scale is stored.
        whole: the scale of the matrix over them (NVFP4, two stages), else None.
    """
    if scheme.number.powers_of_two:
        return _powers_of_two(largest)
    if scheme.number.global_scale:
        assert whole is not None
        scale = np.clip(largest / (np.float32(E2M1_MAX) * whole), E4M3_SMALLEST, E4M3_MAX)
        return e4m3_rounded(np.where(largest > 0, scale, np.float32(1)))
    if scheme.number.is_fp8:
        scale = largest / np.float32(E4M3_MAX)
        return np.where(scale > 0, scale, np.float32(1))
    if whole is not None:  # rounding keeps the largest the largest
        largest = e4m3_rounded(largest / whole)
    scale = np.maximum(largest / INT4_HALF_RANGE, INT4_SMALLEST_SCALE)
    return rounded_values(scale, _FLOATS[dtype])


def searched_shares(scheme: DeclaredScheme) -> tuple[Fraction, Fraction]:
    """The ends of a search: the smallest and the largest share of the absmax scale.

    At the upper one NVFP4's largest weight becomes the code 4 instead of 6, and INT4's 7 instead of
    7.5, which is no code. Of FP4 the lower one was reached up to version 0.2.0.
    """
    if scheme.number.global_scale:
        return QUARTER, Fraction(6, 4)
    return QUARTER, Fraction(15, 14) if scheme.number.is_integer else Fraction(1)


def share_of_scales(
    share: Fraction, largest: Floats, scheme: DeclaredScheme, dtype: str, whole: np.float32 | None
) -> Floats:
    """A share of what `absmax_scales` gives, rounded to what is stored: where a search ends.

    NVFP4's are rounded once, from what is no scale in FP8 yet.
    """
    factor = np.float32(share)
    if scheme.number.global_scale:
        assert whole is not None
        exact = largest / (np.float32(E2M1_MAX) * whole)
        scale = np.clip(exact * factor, E4M3_SMALLEST, E4M3_MAX)
        return e4m3_rounded(np.where(largest > 0, scale, np.float32(1)))
    scale = absmax_scales(largest, scheme, dtype, whole)
    if scheme.number.powers_of_two:
        return np.maximum(scale, E8M0_SMALLEST / factor) * factor
    if scheme.number.is_fp8:
        return scale * factor
    return rounded_values(np.maximum(scale * factor, INT4_SMALLEST_SCALE), _FLOATS[dtype])


def _powers_of_two(largest: Floats) -> Floats:
    """2^(floor(log2(absmax')) - 2), where absmax' is absmax rounded to one bit of mantissa, up.

    In bits: half of the second mantissa bit carries into the exponent from 1.75 on. The exponent
    lies in -127 .. 127; an absmax' of infinity gets the largest.
    """
    fields = (largest.view(np.uint32) + np.uint32(1 << 21)) >> np.uint32(23)
    exponents = np.clip(fields.astype(np.int32) - 127 - 2, -127, 127)
    return np.ldexp(np.float32(1), np.where(fields == 255, 127, exponents))
