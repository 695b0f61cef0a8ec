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
    words = _bytes_of_pairs(nibbles.contiguous().view(torch.int16) & 0x0F0F).view(torch.int32)
    if interleaved:
        words = _exchanged(_exchanged(words, 4, 0x00F000F0), 8, 0x0000FF00)
    return words


def fp4_bytes(codes: Tensor) -> Tensor:
    """Pack FP4 codes, two to a byte, the even column in the low four bits.

    Args:
        codes: [rows, in_features] uint8 in [0, 15], in_features even.

    Returns:
        [rows, in_features / 2] uint8.
    """
    return _bytes_of_pairs(codes.contiguous().view(torch.int16))


def fp4_codes_of_bytes(packed: Tensor) -> Tensor:
    """The inverse of `fp4_bytes`: [rows, in_features / 2] uint8 -> [rows, in_features] uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def _bytes_of_pairs(pairs: Tensor) -> Tensor:
    """The low four bits of both bytes of each int16 element, the other bits zero -> uint8."""
    return (pairs | pairs >> 4).to(torch.uint8)


def _exchanged(words: Tensor, distance: int, mask: int) -> Tensor:
    """The bits under the mask change places with those that lie `distance` higher."""
    different = (words ^ words >> distance) & mask
    return words ^ different ^ different << distance


def packed(dtype: WeightDtype, codes: Tensor, *, interleaved: bool, offset: int) -> Tensor:
    """The codes of any format, row by row, as the elements that are stored.

    Args:
        codes: [rows, in_features], see `QuantizedWeight`.
        interleaved: see `int4_words`, as `offset`; other formats are packed in one way only.
    """
    number = NUMBER_FORMATS[dtype]
    if number.is_integer:
        return int4_words(codes, interleaved=interleaved, offset=offset)
    return fp4_bytes(codes) if number.is_fp4 else codes
