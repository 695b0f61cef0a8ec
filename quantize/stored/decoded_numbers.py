"""Decoding of stored tensors in numpy: floats, FP8 and FP4 by definition, packed integers.

It shares no code with the writing side and does not import torch. All works on blocks of rows. An
array given as `out` is contiguous float32 of the result's size; it is written and returned.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt

from ..files.checkpoint import Checkpoint, open_weights, pread_exactly
from ..files.safetensors_header import DTYPE_BYTES, TensorInfo
from .layouts.scheme import FP8_DTYPE, NIBBLES_PER_WORD, DeclaredScheme

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
INTEGERS: Mapping[str, np.dtype[np.signedinteger]] = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
}
"""Dtypes of the tables of ids, by safetensors spelling."""

_INT4 = (*range(8), *range(-8, 0)), tuple(range(-8, 8))
"""Values of the 16 nibbles: in two's complement, and unsigned, which store code + 8."""
WORD_BITS = 32


def _e4m3_table() -> Floats:
    """The 256 values of F8_E4M3 ("fn": no infinities, two NaN codes).

    Source: OCP 8-bit floating point specification, table 1.
    """
    values = np.empty(256, np.float32)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
        if exponent == 15 and mantissa == 7:
            size = np.nan
        values[code] = -size if code & 128 else size
    return values


E8M0_BIAS = 127
E4M3 = _e4m3_table()
E2M1: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The 16 values of FP4. Source: OCP Microscaling specification 1.0, table 5."""
Words = npt.NDArray[np.uint32]
Pairs = npt.NDArray[np.uint64]


@cache
def _e4m3_pairs() -> Pairs:
    """The two values of every two bytes, as one element, so that one look-up decodes both."""
    both = np.arange(2**16)
    return _joined(E4M3[both & 255], E4M3[both >> 8])


@cache
def _nibble_pairs(values: tuple[float, ...]) -> Pairs:
    """The same for the two halves of every byte; `values` are those of four bits."""
    table, octets = np.array(values, np.float32), np.arange(256)
    return _joined(table[octets & 15], table[octets >> 4])


def _joined(first: Floats, second: Floats) -> Pairs:
    joined: Pairs = np.stack([first, second], axis=1).view(np.uint64).reshape(-1)
    return joined


def _look_up(pairs: Pairs, elements: npt.NDArray[np.unsignedinteger], out: Floats) -> None:
    """Both values of every element; no index is out of range; mode "raise" would copy `out`."""
    np.take(pairs, elements.reshape(-1), out=out.reshape(-1).view(np.uint64), mode="clip")


def blocks_of(rows: int, per_block: int) -> Iterator[range]:
    """Consecutive blocks of rows."""
    for first in range(0, rows, per_block):
        yield range(first, min(first + per_block, rows))


def read_rows(checkpoint: Checkpoint, tensor: TensorInfo, first: int, stop: int) -> Bytes:
    """The bytes of rows `first` .. `stop` - 1 of a tensor; a tensor without axes is one row."""
    rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.nbytes // rows if rows else 0
    block = np.empty((stop - first) * row_bytes, np.uint8)
    path = checkpoint.folder / tensor.file
    with open_weights(path) as descriptor:
        pread_exactly(descriptor, block.data, tensor.start + first * row_bytes, path)
    return block


def read_whole(checkpoint: Checkpoint, tensor: TensorInfo) -> Bytes:
    """All bytes of a tensor."""
    return read_rows(checkpoint, tensor, 0, tensor.shape[0] if tensor.shape else 1)


def read_integers(checkpoint: Checkpoint, tensor: TensorInfo) -> npt.NDArray[np.int64]:
    """The elements of a tensor of one of the dtypes `INTEGERS`, one after the other."""
    return read_whole(checkpoint, tensor).view(INTEGERS[tensor.dtype]).astype(np.int64)


def floats(block: Bytes, dtype: str, *, out: Floats | None = None) -> Floats:
    """BF16, F16, F32 or F8_E4M3 bytes -> their exact values, [number of elements] without `out`."""
    if out is None:
        out = np.empty(block.size // DTYPE_BYTES[dtype], np.float32)
    flat = out.reshape(-1)
    if dtype == "BF16":  # the upper half of a float32
        bits = flat.view(np.uint32)
        bits[:] = block.view(np.uint16)
        np.left_shift(bits, 16, out=bits)
    elif dtype in ("F16", "F32"):
        flat[:] = block.view(np.float16 if dtype == "F16" else np.float32)
    else:
        assert dtype == FP8_DTYPE, f"{dtype} holds no floating-point values"
        even = block.size & ~1
        _look_up(_e4m3_pairs(), block[:even].view(np.uint16), flat[:even])
        flat[even:] = E4M3[block[even:]]
    return out


def stored_scalar(checkpoint: Checkpoint, tensor: TensorInfo) -> float:
    """The value of a tensor of one number."""
    return float(floats(read_whole(checkpoint, tensor), tensor.dtype)[0])


def unpack_int4(
    words: npt.NDArray[np.int32], pack_method: str, *, unsigned: bool, out: Floats | None
) -> Floats:
    """INT4 codes of words [rows, words per row] -> [rows, 8 * words per row] float32, -8 .. 7."""
    rows, per_row = words.shape
    if out is None:
        out = np.empty((rows, per_row * NIBBLES_PER_WORD), np.float32)
    bits = ordered(words.view(np.uint32), pack_method)
    _look_up(_nibble_pairs(_INT4[unsigned]), bits.view(np.uint8), out)
    return out


def ordered(words: Words, pack_method: str) -> Words:
    """Packed words with column 8c + i in nibble i, whichever order they had."""
    if pack_method == "order":
        return words
    # Bytes 0 1 2 3 -> 0 2 1 3, then the same for the nibbles of each half.
    return _exchanged(_exchanged(words, 8, 0x0000FF00), 4, 0x00F000F0)


def unpack_int4_columns(
    words: npt.NDArray[np.int32], pack_method: str, *, unsigned: bool
) -> Floats:
    """INT4 codes of words along the outputs: [inputs, words] -> [8 * words, inputs], as above."""
    across = ordered(np.ascontiguousarray(words.T).view(np.uint32), pack_method)
    numbers = unpacked(across, 4, len(across) * NIBBLES_PER_WORD)
    if not unsigned:
        numbers ^= np.uint8(8)  # two's complement is now code + 8
    return np.subtract(numbers, np.float32(8), dtype=np.float32)


def unpacked(words: Words, bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` numbers along the first axis, the least significant bits first.

    Words of 32 bits [any, n] -> [count, n]; numbers of three bits cross the ends of words.
    """
    first, shift = np.divmod(np.arange(count) * bits, WORD_BITS)
    numbers = words[first] >> shift[:, None].astype(np.uint32)
    across = np.flatnonzero(shift + bits > WORD_BITS)
    if len(across):
        left = (WORD_BITS - shift[across])[:, None].astype(np.uint32)
        numbers[across] |= words[first[across] + 1] << left
    numbers &= np.uint32(2**bits - 1)
    return numbers.astype(np.uint8)


def _exchanged(words: Words, distance: int, mask: int) -> Words:
    """Swap the bits under the mask with those that lie `distance` higher."""
    different = (words ^ words >> np.uint32(distance)) & np.uint32(mask)
    exchanged: Words = words ^ different ^ different << np.uint32(distance)
    return exchanged


def decoded_codes(stored: Bytes, scheme: DeclaredScheme, out: Floats | None) -> Floats:
    """Codes of stored rows [rows, bytes], with the last word's padding: integers, E4M3 or E2M1.

    For FP4 the even column is in the low four bits of a byte.
    """
    if scheme.number.is_integer:
        unsigned = scheme.layout.unsigned
        if scheme.number.bits == 8:  # code + 128, in whole bytes
            return np.subtract(stored, np.float32(128), out=out, dtype=np.float32)
        words, method = stored.view(np.int32), str(scheme.pack_method)
        return unpack_int4(words, method, unsigned=unsigned, out=out)
    if scheme.number.is_fp8:
        return floats(stored.reshape(-1), FP8_DTYPE, out=out).reshape(stored.shape)
    if out is None:
        out = np.empty((len(stored), 2 * stored.shape[1]), np.float32)
    _look_up(_nibble_pairs(tuple(E2M1.tolist())), stored, out)
    return out


def scale_values(block: Bytes, dtype: str) -> Floats:
    """Stored scales of any format -> float32; E8M0, "U8" too, is 2^(byte - 127), NaN for 255."""
    if dtype in ("U8", "F8_E8M0"):
        nan = np.where(block == 255, np.float32(np.nan), np.float32(1))
        powers: Floats = np.ldexp(nan, block.astype(np.int32) - E8M0_BIAS)
        return powers
    return floats(block, dtype)
