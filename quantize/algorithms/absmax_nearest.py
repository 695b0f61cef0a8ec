"""Absmax scales and nearest codes: what every toolkit does by default, in our own numerics."""

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.schema import WeightFormat
from ..numerics.absmax import block_absmax, row_absmax
from ..numerics.fp8 import fp8_codes, fp8_scale
from ..numerics.int4 import int4_codes, int4_scale
from ..numerics.quantized_weight import QuantizedWeight
from ..numerics.rows import absmax_scale, cached_rows, nearest_codes, whole_scale
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
        dtype = stored_scale_dtype(weights)

        def scale_of(rows: Tensor, whole: Tensor | None, _at: slice) -> Tensor:
            return absmax_scale(weights.dtype, rows, whole, dtype)

        return nearest_by_rows(weight, weights, absmax, scale_of)


def nearest_by_rows(
    weight: Tensor,
    weights: WeightFormat,
    absmax: Tensor | None,
    scale_of: Callable[[Tensor, Tensor | None, slice], Tensor],
) -> QuantizedWeight:
    """The nearest codes under scales of rows or groups.

    Args:
        weight: as `absmax`, see `RowAlgorithm`.
        scale_of: the scales [rows, 1] of some rows, from these, the scale of the whole matrix, and
            which of all rows they are; a group is a row.
    """
    all_rows = weight.reshape(-1, weights.group_size or weight.shape[1])
    whole = whole_scale(weights.dtype, row_absmax(weight).amax() if absmax is None else absmax)
    scales, codes = [], []
    for at in cached_rows(all_rows):
        rows = all_rows[at]
        scales.append(scale_of(rows, whole, at))
        codes.append(nearest_codes(weights.dtype, rows, scales[-1], whole))
    return QuantizedWeight(
        codes=torch.cat(codes).view(weight.shape),
        scale=torch.cat(scales).view(len(weight), -1),
        global_scale=whole,
        group_size=weights.group_size,
    )


def stored_scale_dtype(weights: WeightFormat) -> torch.dtype | None:
    """Of INT4 scales; None = that of the weight."""
    return torch.float16 if weights.scale_dtype == "float16" else None


def _fp8_of_matrix(weight: Tensor, absmax: Tensor | None) -> QuantizedWeight:
    scale = fp8_scale(row_absmax(weight).amax(dim=0, keepdim=True) if absmax is None else absmax)
    codes = torch.cat([fp8_codes(weight[at], scale) for at in cached_rows(weight)])
    return QuantizedWeight(codes=codes, scale=scale)


def _fp8_of_blocks(weight: Tensor, size: int) -> QuantizedWeight:
    scale = fp8_scale(block_absmax(weight, size))
    wide = scale.repeat_interleave(size, dim=1)[:, : weight.shape[1]]
    codes = torch.cat([
        fp8_codes(rows[at], wide[k : k + 1])
        for k, rows in enumerate(torch.split(weight, size))
        for at in cached_rows(rows)
    ])  # fmt: skip
    return QuantizedWeight(codes=codes, scale=scale, group_size=size)


def _int4_of_fp8(weight: Tensor, absmax: Tensor | None) -> QuantizedWeight:
    """Two stages: the weight to FP8 under one scale, these values to INT4 per row, in float32.

    So does Quark 0.13 with a float32 weight; in a narrower dtype it rounds both more than once.
    """
    largest = row_absmax(weight).amax(dim=0, keepdim=True) if absmax is None else absmax
    first = fp8_scale(largest)
    scales, codes = [], []
    for at in cached_rows(weight):
        values = fp8_codes(weight[at], first).float()
        scales.append(int4_scale(values))
        codes.append(int4_codes(values, scales[-1]))
    return QuantizedWeight(
        codes=torch.cat(codes), scale=torch.cat(scales), global_scale=first.reshape(())
    )
