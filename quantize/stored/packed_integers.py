"""Integers packed one behind the other into words of 32 bits, as GPTQ and AWQ have them.

Numbers of three bits lie across the ends of words; no number is padded.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
WORD_BITS = 32


def words_for(count: int, bits: int) -> int:
    """Words that hold `count` numbers."""
    return -(-count * bits // WORD_BITS)


def unpacked(words: Words, bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The first numbers along the first axis, the least significant bits first.

    Args:
        words: [words_for(count, bits) or more, n].
        bits: of a number, at most 8.

    Returns:
        [count, n].
    """
    first, shift = np.divmod(np.arange(count) * bits, WORD_BITS)
    numbers = words[first] >> shift[:, None].astype(np.uint32)
    across = np.flatnonzero(shift + bits > WORD_BITS)
    if len(across):
        left = (WORD_BITS - shift[across])[:, None].astype(np.uint32)
        numbers[across] |= words[first[across] + 1] << left
    numbers &= np.uint32(2**bits - 1)
    return numbers.astype(np.uint8)
