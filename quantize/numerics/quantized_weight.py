"""`QuantizedWeight`: what every number format turns a weight into."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .fp4 import fp4_values


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight or a block of its rows as codes and scales: w ≈ codes * scale * global_scale.

    Attributes:
        codes: [rows, in_features]: int8 in [-8, 7] (int4), float8_e4m3fn (fp8_e4m3), or uint8 in
            [0, 15], a sign bit and a magnitude of `E2M1` (nvfp4, mxfp4).
        scale: one element per [rows / R, in_features / C] part of the weight: [rows, 1] (channel),
            [1, 1] (tensor), [rows, groups] (group), [row blocks, column blocks] (block). int4: the
            weight's dtype or that of the recipe; fp8_e4m3: float32; nvfp4: float8_e4m3fn; mxfp4:
            float32 powers of two.
        global_scale: [] float32 (nvfp4, and the first stage of two), else None.
        group_size: inputs (and rows, for blocks) that share a scale; None for channel and tensor.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None = None
    group_size: int | None = None

    def block(self, rows: slice) -> "QuantizedWeight":
        """Some rows of a weight whose scales are of rows or groups."""
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
    """INT4 codes and scales per channel as FP8 ones of the same values: nothing is rounded.

    Args:
        block: int8 codes in [-8, 7], scale [rows, 1].

    Returns:
        float8_e4m3fn codes, which hold every whole number up to 16, and float32 scales.
    """
    return QuantizedWeight(
        codes=block.codes.float().to(torch.float8_e4m3fn), scale=block.scale.float()
    )


def code_values(codes: Tensor) -> Tensor:
    """The values that codes stand for, float32, codes' shape."""
    return fp4_values(codes) if codes.dtype == torch.uint8 else codes.float()
