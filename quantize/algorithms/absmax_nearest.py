"""Absmax scales and nearest codes: what every toolkit does by default, in our own numerics."""

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.schema import WeightFormat
from ..numerics.absmax import block_absmax, row_absmax
from ..numerics.fp8 import fp8_codes, fp8_scale
from ..numerics.int4 import int4_codes, int4_scale
from ..numerics.quantized_weight import QuantizedWeight
from ..numerics.rows import absmax_scale, nearest_codes, whole_scale
from .algorithm import RowAlgorithm
from .input_moments import InputMoments


class AbsmaxNearest(RowAlgorithm):
    """Scales such that the largest magnitude fits, then the nearest codes."""

    @override
    def quantize(
        self,
        weight: Tensor,
        weights: WeightFormat,
        *,
        absmax: Tensor | None,
        moments: InputMoments | None,
    ) -> QuantizedWeight:
        if weights.granularity == "tensor":
            return _fp8_of_matrix(weight, absmax)
        if weights.granularity == "block":
            return _fp8_of_blocks(weight, weights.group_size or 1)
        if weights.first_stage is not None:
            return _int4_of_fp8(weight, absmax)
        rows = weight.reshape(-1, weights.group_size or weight.shape[1])  # a group is a row
        whole = whole_scale(weights.dtype, row_absmax(weight).amax() if absmax is None else absmax)
        scale = absmax_scale(weights.dtype, rows, whole, stored_scale_dtype(weights))
        return QuantizedWeight(
            codes=nearest_codes(weights.dtype, rows, scale, whole).view(weight.shape),
            scale=scale.view(len(weight), -1),
            global_scale=whole,
            group_size=weights.group_size,
        )


def stored_scale_dtype(weights: WeightFormat) -> torch.dtype | None:
    """Of INT4 scales; None = that of the weight."""
    return torch.float16 if weights.scale_dtype == "float16" else None


def _fp8_of_matrix(weight: Tensor, absmax: Tensor | None) -> QuantizedWeight:
    scale = fp8_scale(row_absmax(weight).amax(dim=0, keepdim=True) if absmax is None else absmax)
    return QuantizedWeight(codes=fp8_codes(weight, scale), scale=scale)


def _fp8_of_blocks(weight: Tensor, size: int) -> QuantizedWeight:
    scale = fp8_scale(block_absmax(weight, size))
    wide = scale.repeat_interleave(size, dim=0)[: len(weight)]
    wide = wide.repeat_interleave(size, dim=1)[:, : weight.shape[1]]
    return QuantizedWeight(codes=fp8_codes(weight, wide), scale=scale, group_size=size)


def _int4_of_fp8(weight: Tensor, absmax: Tensor | None) -> QuantizedWeight:
    """Two stages: the weight to FP8 under one scale, these values to INT4 per row, in float32.

    So does Quark 0.13 with a float32 weight; in a narrower dtype it rounds both more than once.
    """
    largest = row_absmax(weight).amax(dim=0, keepdim=True) if absmax is None else absmax
    first = fp8_scale(largest)
    values = fp8_codes(weight, first).float()
    scale = int4_scale(values)
    return QuantizedWeight(
        codes=int4_codes(values, scale), scale=scale, global_scale=first.reshape(())
    )
