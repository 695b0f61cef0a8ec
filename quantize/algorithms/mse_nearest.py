"""The scale search: each row or group gets the scale that leaves the smallest squared error.

A smaller scale than that of absmax clips the largest weights and rounds all others more finely. A
larger one moves the grid, so that its codes may lie nearer: of FP4, whose codes stand close
together below 4 and far apart above, often the one that makes a 4 of the largest weight ("four over
six", arXiv 2512.02010). Of FP4 every scale between the two ends is tried that can be stored, so
that there is no better one; of INT4 and FP8, which have too many, steps of a 32nd.

The error of the weights is not that of the outputs: acceptance may fall where the weights come
closer. So each weight counts by the mean square of its inputs, where these are known.
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
"""Factors of the absmax scale, which is tried first; down to 1/4, as in every format."""
LARGER_INT4 = (15 / 14, 34 / 32, 33 / 32)
"""The same; with the first, absmax / 7, the largest weight is a code and is not clipped."""
POWERS = (2.0, 0.5, 0.25)
"""All factors for scales that are powers of two."""
LARGEST_E4M3, SMALLEST_SHARE = 1.5, 0.25
"""The ends of the search over scales in FP8; six quarters, or four over six."""
_E4M3_STEPS = 23
"""So many numbers of FP8 lie from 1/4 to 1.5 of a number, at most, both ends rounded."""
_E8M0 = 2.0**-127, 2.0**127
"""The smallest and the largest power of two that is stored."""


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
    """Scales [rows, 1] to try, as they are stored: that of absmax, then from large to small."""
    absmax = absmax_scale(weights.dtype, rows, whole, stored_scale_dtype(weights))
    yield absmax
    if weights.number.powers_of_two:
        yield from ((absmax * factor).clamp(*_E8M0) for factor in POWERS)
    elif weights.number.global_scale:
        yield from _e4m3_scales(rows, whole)
    elif weights.number.is_fp8:
        yield from (torch.where(absmax * f > 0, absmax * f, absmax) for f in SMALLER)
    else:
        for factor in (*LARGER_INT4, *SMALLER):
            yield (absmax.float() * factor).clamp_(min=SMALLEST_SCALE).to(absmax.dtype)


def _e4m3_scales(rows: Tensor, whole: Tensor | None) -> Iterator[Tensor]:
    """Every FP8 number between the ends, of each row its own; numbers sort like their bits."""
    exact = row_absmax(rows).float() / served_scale(torch.tensor(FP4_MAX), whole)
    largest, smallest = (
        torch.where(exact > 0, (exact * share).clamp_(SMALLEST_E4M3, FP8_MAX), 1.0)
        .to(FP8)
        .view(torch.uint8)
        .to(torch.int16)
        for share in (LARGEST_E4M3, SMALLEST_SHARE)
    )
    for step in range(_E4M3_STEPS):
        yield torch.maximum(largest - step, smallest).to(torch.uint8).view(FP8)
