"""Codes and scales of every number format by their definition, slow and obvious, in numpy.

Nothing of the package is used here, see `handmade.py`.
"""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tiny import store, values_of

Array = npt.NDArray[Any]
Dtype = Literal["int4", "int8", "fp8", "nvfp4", "mxfp4"]
HALF = {"int4": 8, "int8": 128}
"""Integers of a dtype on either side of zero: -8 .. 7, half of which is 7.5."""
Granularity = Literal["channel", "tensor", "group", "block"]


class Rounded(NamedTuple):
    """A weight as codes and scales: w ≈ value of code * scale * whole.

    `codes` are integers themselves, and the bits of FP8 and FP4. There is one scale per
    [rows, groups], [row blocks, column blocks] or [1, 1]; `whole` is NVFP4's scale of scales.
    """

    codes: Array
    scale: Array
    whole: np.float32 | None = None


def group_width(dtype: Dtype, granularity: Granularity) -> int | None:
    """Inputs that share a scale; None where the whole row does."""
    if granularity == "block":
        return 128
    return {"nvfp4": 16}.get(dtype, 32) if granularity == "group" else None


def rounded(
    w: Array, dtype: Dtype, granularity: Granularity, scale_dtype: str, largest: float
) -> Rounded:
    """A float32 weight under absmax scales; `largest` is what one scale of a matrix covers."""
    absmax = covered(w, dtype, granularity)
    if granularity == "tensor":
        absmax = np.full_like(absmax, largest)
    whole = None
    if dtype in HALF:
        half = np.float32(HALF[dtype] - 0.5)
        scale = values_of(store(np.maximum(absmax / half, 2.0**-23), scale_dtype))
    elif dtype == "fp8":
        scale = np.where(absmax > 0, absmax / np.float32(448), 1).astype(np.float32)
    elif dtype == "nvfp4":
        whole = np.float32(largest or 6 * 448) / np.float32(6 * 448)
        ratio = np.clip(absmax / (np.float32(6) * whole), 2.0**-9, 448).astype(np.float32)
        scale = e4m3_values(nearest_e4m3(np.where(absmax > 0, ratio, 1)), ratio.shape)
    else:
        scale = np.vectorize(power_of_two)(absmax).astype(np.float32)
    return Rounded(codes_under(w, dtype, granularity, scale, whole), scale, whole)


def covered(w: Array, dtype: Dtype, granularity: Granularity) -> Array:
    """Largest magnitude under every scale, in the shape of `Rounded.scale`."""
    rows, columns = w.shape
    size = group_width(dtype, granularity) or columns
    height = {"block": 128, "tensor": rows}.get(granularity, 1)
    found = [
        [np.abs(w[r : r + height, c : c + size]).max() for c in range(0, columns, size)]
        for r in range(0, rows, height)
    ]
    return np.array(found, np.float32)


def spread(scale: Array, dtype: Dtype, granularity: Granularity, shape: tuple[int, ...]) -> Array:
    """One scale per weight."""
    size = group_width(dtype, granularity) or shape[1]
    height = {"block": 128, "tensor": shape[0]}.get(granularity, 1)
    return scale.repeat(height, 0).repeat(size, 1)[: shape[0], : shape[1]]


def codes_under(
    w: Array, dtype: Dtype, granularity: Granularity, scale: Array, whole: np.float32 | None
) -> Array:
    """The nearest codes under given scales."""
    wide = spread(scale, dtype, granularity, w.shape)
    if half := HALF.get(dtype):
        return np.clip(np.rint(w * (np.float32(1) / wide)), -half, half - 1).astype(int)
    if dtype == "fp8":
        return np.frombuffer(nearest_e4m3(w / wide), np.uint8).reshape(w.shape)
    codes = nearest_e2m1(w / (wide if whole is None else wide * whole))
    return np.where(codes == 8, 0, codes) if dtype == "mxfp4" else codes  # Quark: no minus zero


def power_of_two(absmax: float) -> float:
    """2^(e - 2) for absmax' = m * 2^e with m in [1, 2); m of 1.75 or more counts as the next 2^e.

    Exponents lie in [-127, 127]; 0 gets the smallest.
    """
    mantissa, exponent = math.frexp(absmax)  # mantissa in [0.5, 1)
    floor = exponent - 1 + (mantissa >= 0.875) if absmax else -200
    return 2.0 ** min(max(floor - 2, -127), 127)


def e4m3_value(code: int) -> float:
    """The value of an F8_E4M3 code, from its bits as text."""
    bits = f"{code:08b}"
    sign, exponent, mantissa = -1.0 if bits[0] == "1" else 1.0, int(bits[1:5], 2), int(bits[5:], 2)
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


# Even codes first: the first of two equally near ones is the even one. 127 is NaN.
_CODES = np.array([*range(0, 127, 2), *range(1, 127, 2)], np.uint8)
_MAGNITUDES = np.array([e4m3_value(int(code)) for code in _CODES], np.float32)
_FP4 = {0: 0.0, 2: 1.0, 4: 2.0, 6: 4.0, 1: 0.5, 3: 1.5, 5: 3.0, 7: 6.0}  # even codes first


def nearest_e4m3(values: Array) -> bytes:
    """The codes nearest to float32 values, ties to the even code, saturating."""
    distances = np.abs(np.abs(values.reshape(-1, 1)) - _MAGNITUDES)
    codes = _CODES[distances.argmin(axis=1)]
    return bytes(codes | np.where(values.ravel() < 0, 128, 0).astype(np.uint8))


def e4m3_values(codes: bytes, shape: tuple[int, ...]) -> Array:
    return np.array([e4m3_value(code) for code in codes], np.float32).reshape(shape)


def nearest_e2m1(values: Array) -> Array:
    """The codes nearest to float32 values, ties to the even code, saturating at 6."""
    codes, magnitudes = np.array(list(_FP4)), np.array(list(_FP4.values()), np.float32)
    distances = np.abs(np.abs(values[..., None]) - magnitudes)
    return codes[distances.argmin(axis=-1)] + np.where(values < 0, 8, 0)


def code_values(dtype: Dtype) -> dict[int, float]:
    """Code -> value, one code per value, from the smallest value to the largest."""
    if half := HALF.get(dtype):
        return {code: float(code) for code in range(-half, half)}
    if dtype == "fp8":
        values = {code: e4m3_value(code) for code in range(256) if code % 128 != 127}
    else:
        values = dict(_FP4) | {code + 8: -value for code, value in _FP4.items()}
    del values[128 if dtype == "fp8" else 8]  # minus zero
    return dict(sorted(values.items(), key=lambda item: item[1]))
