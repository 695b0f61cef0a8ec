"""Rounding to what is stored, in numpy: BF16, F16, E4M3 and E2M1; to nearest, ties to even.

By other means than the writing side, which leaves it to torch.
"""

import numpy as np
import numpy.typing as npt

from ..files.safetensors_header import FloatDtype
from ..stored.decoded_numbers import Bytes, Floats, floats

E4M3_MAX, E2M1_MAX = 448.0, 6.0
_EXPONENT = np.uint32(0x7F800000)


def rounded_bytes(values: Floats, dtype: FloatDtype) -> Bytes:
    """Finite float32 values as stored bytes.

    BF16 is the upper half of a float32: adding half of the lower half, less one where the result is
    even already, carries exactly when the nearest value is the next one.
    """
    if dtype == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        halves: npt.NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(
            np.uint16
        )
        return halves.reshape(-1).view(np.uint8)
    kind = np.float16 if dtype == "F16" else np.float32
    return np.ascontiguousarray(values, kind).reshape(-1).view(np.uint8)


def rounded_values(values: Floats, dtype: FloatDtype) -> Floats:
    """Finite float32 values rounded to `dtype`, of the same shape."""
    with np.errstate(over="ignore"):  # infinity is reported as a fault
        return floats(rounded_bytes(values, dtype), dtype).reshape(values.shape)


def e4m3_rounded(x: Floats, *, out: Floats | None = None, step: Floats | None = None) -> Floats:
    """Nearest values of F8_E4M3, saturating at 448; x's shape. Zero has no sign.

    Between powers of two 2^e and 2^(e+1) they are 2^(e-3) apart, and 2^-9 below 2^-6.

    Args:
        x: any shape.
        out: as x, written and returned; may be x.
        step: as x, overwritten; another array than `out`.
    """
    return _rounded(x, E4M3_MAX, 2.0**-6, 2.0**-3, out, step)


def e2m1_rounded(x: Floats, *, out: Floats | None = None, step: Floats | None = None) -> Floats:
    """Nearest of the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; see `e4m3_rounded`."""
    return _rounded(x, E2M1_MAX, 1.0, 0.5, out, step)


def _rounded(
    x: Floats,
    largest: float,
    smallest_power: float,
    steps: float,
    out: Floats | None,
    step: Floats | None,
) -> Floats:
    """Round to multiples of `steps` times the power of two below x, `smallest_power` at least.

    Of a float32 sum between 2^23 and 2^24 steps the bits below a step are rounded, to nearest, ties
    to even. Adding 1.5 * 2^23 steps keeps the sums of both signs there.
    """
    out = np.clip(x, np.float32(-largest), np.float32(largest), out=out)
    step = np.empty_like(out) if step is None else step
    np.bitwise_and(out.view(np.uint32), _EXPONENT, out=step.view(np.uint32))
    np.maximum(step, np.float32(smallest_power), out=step)
    np.multiply(step, np.float32(1.5 * 2.0**23 * steps), out=step)
    np.add(out, step, out=out)
    return np.subtract(out, step, out=out)


def int4_words(codes: Floats, scratch: Floats) -> npt.NDArray[np.uint32]:
    """INT4 codes as words of eight, column 8c + i in two's complement in bits 4i .. 4i + 3.

    Args:
        codes: whole numbers from -8 to 7, a multiple of eight.
        scratch: as codes, overwritten; the words lie in it.
    """
    octets, pairs, high = (
        scratch.reshape(-1).view(np.int8)[start : start + codes.size]
        for start in (0, 0, codes.size)
    )
    octets[:] = codes.reshape(-1)
    pairs, high = pairs.view(np.uint16), high.view(np.uint16)
    np.bitwise_and(pairs, np.uint16(0x0F0F), out=pairs)
    np.bitwise_or(pairs, np.right_shift(pairs, np.uint16(4), out=high), out=pairs)
    packed = high.view(np.uint8)[: pairs.size]
    packed[:] = pairs  # the low bytes
    return packed.view(np.uint32)


def sign_bytes(negative: npt.NDArray[np.bool_]) -> Bytes:
    """Of every two elements one byte: bit 3 is set where the first is true, bit 7 the second."""
    pairs = negative.reshape(-1).view(np.uint16)
    return (pairs << np.uint16(3) | pairs >> np.uint16(1)).astype(np.uint8) & np.uint8(0x88)
