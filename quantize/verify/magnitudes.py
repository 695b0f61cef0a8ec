"""Largest magnitudes of weights, found among their bit patterns as they are stored."""

import numpy as np
import numpy.typing as npt

from ..stored.decoded_numbers import Floats, floats

Bits = npt.NDArray[np.unsignedinteger]
_PAIRWISE = 128  # groups smaller than this are reduced pair by pair: short loops are slow


def values_of(bits: Bits, dtype: str) -> Floats:
    """The numbers that bit patterns of `dtype` are, in their shape."""
    return floats(bits.reshape(-1).view(np.uint8), dtype).reshape(bits.shape)


def magnitudes(bits: Bits) -> Bits:
    """Of the bit patterns of floating-point numbers, without their sign: they sort as these do.

    NaN is above infinity. Integers of half the width are compared in half the time.
    """
    return np.bitwise_and(bits, bits.dtype.type(np.iinfo(bits.dtype).max >> 1))


def group_absmax(bits: Bits, group: int) -> Bits:
    """Largest magnitude of every `group` inputs of a row; the last group may be shorter.

    Args:
        bits: [rows, in_features], patterns of floating-point numbers.

    Returns:
        [rows, groups], patterns.
    """
    largest, columns = magnitudes(bits), bits.shape[1]
    if columns % group:
        shorter: Bits = np.maximum.reduceat(largest, np.arange(0, columns, group), axis=1)
        return shorter
    if group < _PAIRWISE and not group & (group - 1):
        while largest.shape[1] * group > columns:
            largest = np.maximum(largest[:, 0::2], largest[:, 1::2])
        return largest
    found: Bits = largest.reshape(len(bits), -1, group).max(axis=2)
    return found
