"""The clip search: each row or group gets the scale that leaves the smallest squared error.

A smaller scale clips the largest weights and rounds all others more finely. The error of the
weights is not that of the outputs: below four bits, and now and then at four, acceptance falls
where the weights come closer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...recipes.schema import WeightFormat
from ..numerics.absmax import row_absmax
from ..numerics.fp4 import (
    FP4_MAX,
    SMALLEST_E4M3,
    fp4_codes,
    fp4_values,
    mxfp4_codes,
    mxfp4_scale,
    nvfp4_global_scale,
    nvfp4_scale,
)
from ..numerics.fp8 import FP8, FP8_MAX, fp8_codes, fp8_scale
from ..numerics.int4 import SMALLEST_SCALE, int4_codes, int4_scale
from ..numerics.quantized_weight import QuantizedWeight
from .base import Need

FACTORS = tuple(i / 32 for i in range(32, 7, -1))
"""Of the absmax scale, 1 down to 1/4."""
POWERS = (1.0, 0.5, 0.25)
"""The same for scales that are powers of two."""


class MseNearest:
    """Scales by search, then the nearest codes; one scale for each row or group."""

    needs: Need = "none"

    def problem(self, weights: WeightFormat) -> str | None:
        """See `Algorithm.problem`."""
        if weights.granularity not in ("channel", "group") or weights.first_stage is not None:
            return "scale: mse searches scales of channels or groups, of one stage"
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
        groups = weight.reshape(-1, weights.group_size or weight.shape[1])
        whole = None
        if weights.dtype == "nvfp4":
            largest = row_absmax(weight).amax() if absmax is None else absmax
            whole = nvfp4_global_scale(largest).reshape(())
        scale = _best(groups, weights, whole)
        return QuantizedWeight(
            codes=_codes(groups, scale, weights, whole).view(weight.shape),
            scale=scale.view(len(weight), -1),
            global_scale=whole,
            group_size=weights.group_size,
        )


def _best(groups: Tensor, weights: WeightFormat, whole: Tensor | None) -> Tensor:
    """The scale of each group with the smallest sum of squared errors; the largest of equals."""
    wide = groups.float()
    best, least = torch.empty(0), torch.full((len(groups), 1), torch.inf)
    for scale in _candidates(groups, weights, whole):
        codes = _codes(groups, scale, weights, whole)
        values = fp4_values(codes) if codes.dtype == torch.uint8 else codes.float()
        served = scale.float() if whole is None else scale.float() * whole
        error = (wide - values * served).square_().sum(dim=1, keepdim=True)
        # torch has no `where` for FP8: choose among bytes.
        best = scale if best.numel() == 0 else _chosen(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def _chosen(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` where the mask is true, else `b`, in their own dtype."""
    if a.dtype != FP8:
        return torch.where(mask, a, b)
    return torch.where(mask, a.view(torch.uint8), b.view(torch.uint8)).view(FP8)


def _candidates(groups: Tensor, weights: WeightFormat, whole: Tensor | None) -> Iterator[Tensor]:
    """Scales [groups, 1] to try: that of absmax first, then smaller ones, as they are stored."""
    if weights.dtype == "mxfp4":
        largest = mxfp4_scale(groups)
        yield from (torch.maximum(largest * f, torch.tensor(2.0**-127)) for f in POWERS)
        return
    if weights.dtype == "nvfp4":
        assert whole is not None
        largest = nvfp4_scale(groups, whole)
        yield largest
        exact = row_absmax(groups).float() / (FP4_MAX * whole)
        for factor in FACTORS[1:]:
            smaller = (exact * factor).clamp_(SMALLEST_E4M3, FP8_MAX)
            yield torch.where(exact > 0, smaller, 1.0).to(FP8)
        return
    if weights.dtype == "fp8_e4m3":
        largest = fp8_scale(row_absmax(groups))
        yield from (torch.where(largest * f > 0, largest * f, largest) for f in FACTORS)
        return
    dtype = torch.float16 if weights.scale_dtype == "float16" else None
    largest = int4_scale(groups, dtype)
    for factor in FACTORS:
        yield (largest.float() * factor).clamp_(min=SMALLEST_SCALE).to(largest.dtype)


def _codes(groups: Tensor, scale: Tensor, weights: WeightFormat, whole: Tensor | None) -> Tensor:
    if weights.dtype == "int4":
        return int4_codes(groups, scale)
    if weights.dtype == "fp8_e4m3":
        return fp8_codes(groups, scale)
    if weights.dtype == "mxfp4":
        return mxfp4_codes(groups, scale)
    assert whole is not None
    return fp4_codes(groups.float() / (scale.float() * whole))
