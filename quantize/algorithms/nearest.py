"""Nearest codes, under absmax scales or under those with the smallest squared error.

A smaller scale than absmax clips the largest weights and rounds all others more finely: so
Integer and FP8 rows are searched in steps of 1/32. FP4 is not clipped: clipped weights of a row all
err towards zero, so their errors add up in the output, and acceptance falls, as measured on every
pair. A larger scale moves the grid, so codes may lie nearer; for NVFP4 often the one that makes
the largest weight a 4 ("four over six", arXiv 2512.02010), and every storable scale from absmax to
there is tried. MXFP4 has no larger scale to try: twice the steps are codes already. Each weight's
error is weighted by the mean square of its inputs, where these are known.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.schema import WeightFormat
from ..numerics.number_formats import (
    FP4_MAX,
    FP8,
    FP8_MAX,
    SMALLEST_E4M3,
    SMALLEST_SCALE,
    absmax_scale,
    block_absmax,
    cached_rows,
    fp8_codes,
    fp8_scale,
    integer_codes,
    integer_scale,
    nearest_codes,
    nearest_values,
    row_absmax,
    served_scale,
    whole_scale,
)
from ..numerics.quantized_weight import QuantizedWeight
from .algorithm import Absmax, Moments, RowAlgorithm


class AbsmaxNearest(RowAlgorithm):
    """Scales at which the largest magnitude fits, then the nearest codes."""

    @override
    def quantize(
        self, weight: Tensor, weights: WeightFormat, *, absmax: Absmax, moments: Moments
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
    absmax: Absmax,
    scale_of: Callable[[Tensor, Tensor | None, slice], Tensor],
) -> QuantizedWeight:
    """The nearest codes under scales of rows, or of groups, which become rows.

    `scale_of`: scales [rows, 1] of some rows, from the scale of the matrix and the rows' range.
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
    """The dtype of INT4 scales; None = that of the weight."""
    return torch.float16 if weights.scale_dtype == "float16" else None


def _fp8_of_matrix(weight: Tensor, absmax: Absmax) -> QuantizedWeight:
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


def _int4_of_fp8(weight: Tensor, absmax: Absmax) -> QuantizedWeight:
    """Round a weight to FP8 under one scale, then to INT4 per row, like Quark 0.13 in float32."""
    largest = row_absmax(weight).amax(dim=0, keepdim=True) if absmax is None else absmax
    first = fp8_scale(largest)
    scales, codes = [], []
    for at in cached_rows(weight):
        values = fp8_codes(weight[at], first).float()
        scales.append(integer_scale(values))
        codes.append(integer_codes(values, scales[-1]))
    whole = first.reshape(())
    return QuantizedWeight(codes=torch.cat(codes), scale=torch.cat(scales), global_scale=whole)


SMALLER = tuple(i / 32 for i in range(31, 7, -1))
"""Factors of the absmax scale, which is tried first; down to 1/4."""
LARGER = (34 / 32, 33 / 32)
"""Those of integers that are larger."""
FOUR_OVER_SIX = 1.5
"""Factor of NVFP4's absmax scale where its search ends."""
_E4M3_STEPS = 6
"""Most numbers of FP8 between a number and 1.5 times it, with both rounded."""


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
        self, weight: Tensor, weights: WeightFormat, *, absmax: Absmax, moments: Moments
    ) -> QuantizedWeight:
        counts = _importance(weight, weights, moments)

        def scale_of(rows: Tensor, whole: Tensor | None, at: slice) -> Tensor:
            return _best(rows, weights, whole, None if counts is None else counts[at])

        return nearest_by_rows(weight, weights, absmax, scale_of)


def _importance(weight: Tensor, weights: WeightFormat, moments: Moments) -> Tensor | None:
    """The weight of each squared error, as rows of groups; None = all equal."""
    if moments is None:
        return None
    squares = moments.squares.to(weight.device).expand(weight.shape)
    return squares.reshape(-1, weights.group_size or weight.shape[1])


def _best(
    rows: Tensor, weights: WeightFormat, whole: Tensor | None, importance: Tensor | None
) -> Tensor:
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
    """`a` where the mask is true, else `b`; torch has no `where` for FP8, so it works on bytes."""
    if a.dtype != FP8:
        return torch.where(mask, a, b)
    return torch.where(mask, a.view(torch.uint8), b.view(torch.uint8)).view(FP8)


def _candidates(rows: Tensor, weights: WeightFormat, whole: Tensor | None) -> Iterator[Tensor]:
    absmax = absmax_scale(weights.dtype, rows, whole, stored_scale_dtype(weights))
    yield absmax
    if weights.number.global_scale:
        yield from _larger_e4m3(absmax, rows, whole)
    elif weights.number.is_fp8:
        yield from (torch.where(absmax * f > 0, absmax * f, absmax) for f in SMALLER)
    elif weights.number.is_integer:
        clips_none = (weights.number.largest + 0.5) / weights.number.largest
        larger = LARGER if clips_none > LARGER[0] else ()
        for factor in (clips_none, *larger, *SMALLER):
            yield (absmax.float() * factor).clamp_(min=SMALLEST_SCALE).to(absmax.dtype)


def _larger_e4m3(absmax: Tensor, rows: Tensor, whole: Tensor | None) -> Iterator[Tensor]:
    """All FP8 numbers above each scale, up to four over six; they sort like their bits."""
    exact = row_absmax(rows).float() / served_scale(torch.tensor(FP4_MAX), whole)
    largest = (exact * FOUR_OVER_SIX).clamp_(SMALLEST_E4M3, FP8_MAX)
    end = torch.where(exact > 0, largest, 1.0).to(FP8).view(torch.uint8)
    for step in range(1, _E4M3_STEPS + 1):
        yield torch.minimum(absmax.view(torch.uint8) + step, end).view(FP8)
