"""`QuantizedWeight`: what every number format turns a weight into."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...recipes.errors import CheckpointError
from ...recipes.formats import NUMBER_FORMATS, WeightDtype
from ..files.safetensors_header import FloatDtype
from .number_formats import fp4_values


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight or a block of its rows as codes and scales: w ≈ codes * scale * global_scale.

    Attributes:
        codes: [rows, in_features]: int8 (integers; int4 in [-8, 7]), float8_e4m3fn (fp8_e4m3), or
            uint8 in [0, 15], a sign bit and a magnitude of `E2M1` (nvfp4, mxfp4).
        scale: one element per [rows / R, in_features / C] part of the weight: [rows, 1] (channel),
            [1, 1] (tensor), [rows, groups] (group), [row blocks, column blocks] (block). Integers:
            the weight's dtype or that of the recipe; fp8_e4m3: float32; nvfp4: float8_e4m3fn;
            mxfp4: float32 powers of two.
        global_scale: [] float32 (nvfp4, and the first stage of two), else None.
        group_size: inputs (and rows, for blocks) that share a scale; None for channel and tensor.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None = None
    group_size: int | None = None

    def block(self, rows: slice) -> "QuantizedWeight":
        """Some rows of a weight whose scales are those of rows or groups."""
        return dataclasses.replace(self, codes=self.codes[rows], scale=self.scale[rows])

    def dequantized(self) -> Tensor:
        """Codes * scale in float32, [rows, in_features]."""
        rows, columns = self.codes.shape
        scale = self.scale.float()
        if self.group_size is not None:
            scale = scale.repeat_interleave(self.group_size, dim=1)[:, :columns]
            if scale.shape[0] != rows:
                scale = scale.repeat_interleave(self.group_size, dim=0)[:rows]
        if self.global_scale is not None:
            scale = scale * self.global_scale
        return code_values(self.codes) * scale


def carried(block: QuantizedWeight) -> QuantizedWeight:
    """INT4 codes and scales per channel as FP8 and float32 ones of the same values."""
    return QuantizedWeight(
        codes=block.codes.float().to(torch.float8_e4m3fn), scale=block.scale.float()
    )


def code_values(codes: Tensor) -> Tensor:
    """The values that codes stand for, float32, codes' shape."""
    return fp4_values(codes) if codes.dtype == torch.uint8 else codes.float()


def int4_words(codes: Tensor, *, interleaved: bool, unsigned: bool) -> Tensor:
    """Pack INT4 codes, eight to an int32 word; the last word of a row is padded with code 0.

    Args:
        codes: [rows, in_features] int8 in [-8, 7].
        interleaved: nibble i (bits 4i .. 4i + 3) holds column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i], the
            order of AWQ and Quark's `reorder`; else column 8c + i.
        unsigned: nibbles store code + 8, else two's complement.
    """
    codes = _whole_words(codes, 8)
    nibbles = codes + 8 if unsigned else codes
    words = _bytes_of_pairs(nibbles.contiguous().view(torch.int16) & 0x0F0F).view(torch.int32)
    if interleaved:
        words = _exchanged(_exchanged(words, 4, 0x00F000F0), 8, 0x0000FF00)
    return words


def int8_words(codes: Tensor) -> Tensor:
    """Pack INT8 codes + 128, four to an int32 word, column 4c + i in byte i; padded with code 0."""
    return (_whole_words(codes, 4).to(torch.int16) + 128).to(torch.uint8).view(torch.int32)


def _whole_words(codes: Tensor, per_word: int) -> Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))


def fp4_bytes(codes: Tensor) -> Tensor:
    """Pack FP4 codes in [0, 15], two to a byte, the even column in the low four bits."""
    return _bytes_of_pairs(codes.contiguous().view(torch.int16))


def fp4_codes_of_bytes(packed: Tensor) -> Tensor:
    """The inverse of `fp4_bytes`: [rows, in_features / 2] uint8 -> [rows, in_features] uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def _bytes_of_pairs(pairs: Tensor) -> Tensor:
    """The low four bits of both bytes of each int16 element, the other bits zero -> uint8."""
    return (pairs | pairs >> 4).to(torch.uint8)


def _exchanged(words: Tensor, distance: int, mask: int) -> Tensor:
    """Swap the bits under the mask with those that lie `distance` higher."""
    different = (words ^ words >> distance) & mask
    return words ^ different ^ different << distance


def packed(dtype: WeightDtype, codes: Tensor, *, interleaved: bool, unsigned: bool) -> Tensor:
    """The codes of any format, row by row, as they are stored; only INT4 has options."""
    number = NUMBER_FORMATS[dtype]
    if dtype == "int8":
        return int8_words(codes)
    if number.is_integer:
        return int4_words(codes, interleaved=interleaved, unsigned=unsigned)
    return fp4_bytes(codes) if number.is_fp4 else codes


Floats = npt.NDArray[np.float32]
TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def rounded(product: Floats, dtype: FloatDtype, name: str, first_row: int) -> Tensor:
    """Round to nearest, ties to even; neither product nor result may overflow."""
    magnitude = np.maximum(product.max(axis=1), -product.min(axis=1))  # NaN where one is
    bad = np.flatnonzero(~_fits(magnitude, dtype))
    if not len(bad):
        return torch.from_numpy(product).to(TORCH_DTYPES[dtype])
    row = int(bad[0])
    if np.isfinite(magnitude[row]):
        raise CheckpointError(
            name,
            f"row {first_row + row} holds values up to {magnitude[row]:g}, which {dtype} cannot"
            " hold",
            fix="use --dtype float32",
        )
    raise CheckpointError(
        name,
        f"row {first_row + row} decodes to NaN or infinity: a quantized value or a scale is"
        " damaged",
        fix="run `draftquant verify`, then quantize the draft again",
    )


def _fits(magnitude: Floats, dtype: FloatDtype) -> npt.NDArray[np.bool_]:
    """Whether values round to finite ones; rounding is monotonic, so a row's largest decides."""
    stored = torch.from_numpy(magnitude).to(TORCH_DTYPES[dtype])
    fits: npt.NDArray[np.bool_] = stored.isfinite().numpy()
    return fits
