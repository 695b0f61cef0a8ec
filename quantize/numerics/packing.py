"""Packing codes into the elements that are stored, INT4 into 32-bit words and FP4 into bytes."""

import torch
from torch import Tensor

from ...recipes.formats import NUMBER_FORMATS, WeightDtype


def int4_words(codes: Tensor, *, interleaved: bool, offset: int) -> Tensor:
    """Pack INT4 codes, eight to an int32 word; the last word of a row is padded with code 0.

    Args:
        codes: [rows, in_features] int8 in [-8, 7].
        interleaved: nibble i (bits 4i .. 4i + 3) holds column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i], the
            order of AWQ and Quark's `reorder`; else column 8c + i.
        offset: added to each code before its low four bits are taken (8 = unsigned nibbles).

    Returns:
        [rows, ceil(in_features / 8)] int32.
    """
    padding = -codes.shape[1] % 8
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
    nibbles = codes + offset if offset else codes
    lanes = nibbles.contiguous().view(torch.int64)  # byte i of a lane: column 8c + i
    if interleaved:
        even = _gather_even_nibbles(lanes)
        odd = _gather_even_nibbles(lanes >> 8)
        return (even | odd << 16).to(torch.int32)
    lanes = lanes & 0x0F0F0F0F0F0F0F0F
    lanes = (lanes | lanes >> 4) & 0x00FF00FF00FF00FF
    lanes = (lanes | lanes >> 8) & 0x0000FFFF0000FFFF
    return (lanes | lanes >> 16).to(torch.int32)


def fp4_bytes(codes: Tensor) -> Tensor:
    """Pack FP4 codes, two to a byte, the even column in the low four bits.

    Args:
        codes: [rows, in_features] uint8 in [0, 15], in_features even.

    Returns:
        [rows, in_features / 2] uint8.
    """
    return codes[:, 0::2] | codes[:, 1::2] << 4


def fp4_codes_of_bytes(packed: Tensor) -> Tensor:
    """The inverse of `fp4_bytes`: [rows, in_features / 2] uint8 -> [rows, in_features] uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def _gather_even_nibbles(lanes: Tensor) -> Tensor:
    """Low nibbles of bytes 0, 2, 4, 6 of each lane -> bits 0 .. 15."""
    lanes = lanes & 0x000F000F000F000F
    lanes = (lanes | lanes >> 12) & 0x000000FF000000FF
    return (lanes | lanes >> 24) & 0xFFFF


def packed(dtype: WeightDtype, codes: Tensor, *, interleaved: bool, offset: int) -> Tensor:
    """The codes of any format, row by row, as the elements that are stored.

    Args:
        dtype: of the weight.
        codes: [rows, in_features], see `QuantizedWeight`.
        interleaved: see `int4_words`, as `offset`; other formats are packed in one way only.
        offset: likewise.
    """
    number = NUMBER_FORMATS[dtype]
    if number.is_integer:
        return int4_words(codes, interleaved=interleaved, offset=offset)
    return fp4_bytes(codes) if number.is_fp4 else codes
