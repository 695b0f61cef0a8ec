"""Absmax scales and nearest codes: what every toolkit does by default, in our own numerics."""

import torch
from torch import Tensor

from ...recipes.schema import WeightFormat
from ..numerics.absmax import block_absmax, row_absmax
from ..numerics.fp4 import fp4_codes, mxfp4_codes, mxfp4_scale, nvfp4_global_scale, nvfp4_scale
from ..numerics.fp8 import fp8_codes, fp8_scale
from ..numerics.int4 import int4_codes, int4_scale
from ..numerics.quantized_weight import QuantizedWeight
from .base import Need


class AbsmaxNearest:
    """Scales such that the largest magnitude fits, then the nearest codes."""

    needs: Need = "none"

    def problem(self, weights: WeightFormat) -> str | None:
        """None: every format of the schema is known here."""
        del weights
        return None

    def quantize(
        self,
        weight: Tensor,
        weights: WeightFormat,
        *,
        absmax: Tensor | None,
        moments: Tensor | None,
    ) -> QuantizedWeight:
        """See `Algorithm.quantize`."""
        del moments
        size = weights.group_size
        if weights.dtype == "fp8_e4m3":
            return _fp8(weight, weights, absmax)
        if weights.first_stage is not None:
            return _int4_of_fp8(weight, absmax)
        if size is None:
            scale = int4_scale(weight, _scale_dtype(weights))
            return QuantizedWeight(codes=int4_codes(weight, scale), scale=scale)
        groups = weight.reshape(-1, size)  # every group is a row of its own
        global_scale = None
        if weights.dtype == "int4":
            scale = int4_scale(groups, _scale_dtype(weights))
            codes = int4_codes(groups, scale)
        elif weights.dtype == "nvfp4":
            largest = row_absmax(weight).amax() if absmax is None else absmax
            global_scale = nvfp4_global_scale(largest).reshape(())
            scale = nvfp4_scale(groups, global_scale)
            codes = fp4_codes(groups.float() / (scale.float() * global_scale))
        else:
            scale = mxfp4_scale(groups)
            codes = mxfp4_codes(groups, scale)
        return QuantizedWeight(
            codes=codes.view(weight.shape),
            scale=scale.view(len(weight), -1),
            global_scale=global_scale,
            group_size=size,
        )


def _fp8(weight: Tensor, weights: WeightFormat, absmax: Tensor | None) -> QuantizedWeight:
    size = weights.group_size
    if size is not None:
        scale = fp8_scale(block_absmax(weight, size))
        wide = scale.repeat_interleave(size, dim=0)[: len(weight)]
        wide = wide.repeat_interleave(size, dim=1)[:, : weight.shape[1]]
        return QuantizedWeight(codes=fp8_codes(weight, wide), scale=scale, group_size=size)
    largest = row_absmax(weight)
    if weights.granularity == "tensor":
        largest = largest.amax(dim=0, keepdim=True) if absmax is None else absmax
    scale = fp8_scale(largest)
    return QuantizedWeight(codes=fp8_codes(weight, scale), scale=scale)


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


def _scale_dtype(weights: WeightFormat) -> torch.dtype | None:
    return torch.float16 if weights.scale_dtype == "float16" else None
