"""The scale search: each row or group gets the scale that leaves the smallest squared error.

A smaller scale than that of absmax clips the largest weights and rounds all others more finely: so
INT4 and FP8 rows are searched, in steps of a 32nd. FP4 is not clipped. Its codes are fine near zero
as they are, and a clipped weight errs towards zero, as all clipped ones of its row do, so that
their errors add up in the output: the weights come closer and acceptance falls, measured on every
pair. A larger scale moves the grid, so that its codes may lie nearer; of NVFP4 often the one that
makes a 4 of the largest weight ("four over six", arXiv 2512.02010), and every scale from absmax to
there is tried that can be stored. MXFP4 has no such scale: twice the steps are codes already.

The error of the weights is not that of the outputs: each weight counts by the mean square of its
inputs, where these are known.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.schema import WeightFormat
from ..numerics.absmax import row_absmax
from ..numerics.fp4 import FP4_MAX, SMALLEST_E4M3
from ..numerics.fp8 import FP8, FP8_MAX
from ..numerics.int4 import SMALLEST_SCALE
from ..numerics.quantized_weight import QuantizedWeight
from ..numerics.rows import absmax_scale, nearest_values, served_scale
from .absmax_nearest import nearest_by_rows, stored_scale_dtype
from .algorithm import RowAlgorithm
from .input_moments import InputMoments

SMALLER = tuple(i / 32 for i in range(31, 7, -1))
"""Factors of the absmax scale, which is tried first; down to 1/4."""
LARGER_INT4 = (15 / 14, 34 / 32, 33 / 32)
"""The same; with the first, absmax / 7, the largest weight is a code and is not clipped."""
FOUR_OVER_SIX = 1.5
"""Of NVFP4's absmax scale, where its search ends."""
_E4M3_STEPS = 6
"""So many numbers of FP8 lie above a number and below 1.5 times it, at most, with both rounded."""


class MseNearest(RowAlgorithm):
    """Scales by search, then the nearest codes; one scale for each row or group."""

    @override
    def problem(self, weights: WeightFormat) -> str | None:
        if weights.granularity not in ("channel", "group") or weights.first_stage is not None:
            return (
                "scale: mse works per channel or per group, and not with values that are"
                " rounded in two stages"
            )
        return None

    @override
    def quantize(
        self,
        weight: Tensor,
        weights: WeightFormat,
        *,
        absmax: Tensor | None,
        moments: InputMoments | None,
    ) -> QuantizedWeight:
        counts = _importance(weight, weights, moments)

        def scale_of(rows: Tensor, whole: Tensor | None, at: slice) -> Tensor:
            return _best(rows, weights, whole, None if counts is None else counts[at])

        return nearest_by_rows(weight, weights, absmax, scale_of)


def _importance(
    weight: Tensor, weights: WeightFormat, moments: InputMoments | None
) -> Tensor | None:
    """How much the squared error of each weight counts, as rows of groups; None = all alike."""
    if moments is None:
        return None
    squares = moments.squares.to(weight.device).expand(weight.shape)
    return squares.reshape(-1, weights.group_size or weight.shape[1])


def _best(
    rows: Tensor, weights: WeightFormat, whole: Tensor | None, importance: Tensor | None
) -> Tensor:
    """The scale of each row with the smallest sum of squared errors; the first tried of equals."""
    wide = rows.float()
    best, least = torch.empty(0), wide.new_full((len(rows), 1), torch.inf)
    for scale in _candidates(rows, weights, whole):
        served = served_scale(scale, whole)
        error = nearest_values(weights.dtype, wide, served).mul_(served).sub_(wide).square_()
        error = error if importance is None else error.mul_(importance)
        error = error.sum(dim=1, keepdim=True)
        best = scale if best.numel() == 0 else _chosen(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def _chosen(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` where the mask is true, else `b`; torch has no `where` for FP8, so among its bytes."""
    if a.dtype != FP8:
        return torch.where(mask, a, b)
    return torch.where(mask, a.view(torch.uint8), b.view(torch.uint8)).view(FP8)


def _candidates(rows: Tensor, weights: WeightFormat, whole: Tensor | None) -> Iterator[Tensor]:
    """Scales [rows, 1] to try, as they are stored: that of absmax first."""
    absmax = absmax_scale(weights.dtype, rows, whole, stored_scale_dtype(weights))
    yield absmax
    if weights.number.global_scale:
        yield from _larger_e4m3(absmax, rows, whole)
    elif weights.number.is_fp8:
        yield from (torch.where(absmax * f > 0, absmax * f, absmax) for f in SMALLER)
    elif weights.number.is_integer:
        for factor in (*LARGER_INT4, *SMALLER):
            yield (absmax.float() * factor).clamp_(min=SMALLEST_SCALE).to(absmax.dtype)


def _larger_e4m3(absmax: Tensor, rows: Tensor, whole: Tensor | None) -> Iterator[Tensor]:
    """All numbers of FP8 above each scale up to four over six; they sort like their bits."""
    exact = row_absmax(rows).float() / served_scale(torch.tensor(FP4_MAX), whole)
    largest = (exact * FOUR_OVER_SIX).clamp_(SMALLEST_E4M3, FP8_MAX)
    end = torch.where(exact > 0, largest, 1.0).to(FP8).view(torch.uint8)
    for step in range(1, _E4M3_STEPS + 1):
        yield torch.minimum(absmax.view(torch.uint8) + step, end).view(FP8)
