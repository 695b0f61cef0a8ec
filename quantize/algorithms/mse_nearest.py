"""The clip search: each row or group gets the scale that leaves the smallest squared error.

A smaller scale clips the largest weights and rounds all others more finely. The error of the
weights is not that of the outputs: below four bits, and now and then at four, acceptance falls
where the weights come closer. So each weight counts by the mean square of its inputs, where these
are known.
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
from ..numerics.quantized_weight import QuantizedWeight, code_values
from ..numerics.rows import absmax_scale, nearest_codes, served_scale
from .absmax_nearest import nearest_by_rows, stored_scale_dtype
from .algorithm import RowAlgorithm
from .input_moments import InputMoments

FACTORS = tuple(i / 32 for i in range(31, 7, -1))
"""Of the absmax scale, down to 1/4; the absmax scale itself is tried first."""
POWERS = (0.5, 0.25)
"""The same for scales that are powers of two."""
SMALLEST_E8M0 = 2.0**-127


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
    """The scale of each row with the smallest sum of squared errors; the largest of equals."""
    wide = rows.float()
    best, least = torch.empty(0), wide.new_full((len(rows), 1), torch.inf)
    for scale in _candidates(rows, weights, whole):
        codes = nearest_codes(weights.dtype, rows, scale, whole)
        served = code_values(codes) * served_scale(scale, whole)
        error = (wide - served).square_()
        error = (error if importance is None else error * importance).sum(dim=1, keepdim=True)
        best = scale if best.numel() == 0 else _chosen(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def _chosen(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` where the mask is true, else `b`; torch has no `where` for FP8, so among its bytes."""
    if a.dtype != FP8:
        return torch.where(mask, a, b)
    return torch.where(mask, a.view(torch.uint8), b.view(torch.uint8)).view(FP8)


def _candidates(rows: Tensor, weights: WeightFormat, whole: Tensor | None) -> Iterator[Tensor]:
    """Scales [rows, 1] to try, as they are stored: that of absmax first, then smaller ones."""
    largest = absmax_scale(weights.dtype, rows, whole, stored_scale_dtype(weights))
    yield largest
    if weights.number.powers_of_two:
        yield from ((largest * f).clamp(min=SMALLEST_E8M0) for f in POWERS)
    elif weights.number.global_scale:
        exact = row_absmax(rows).float() / served_scale(torch.tensor(FP4_MAX), whole)
        for factor in FACTORS:
            smaller = (exact * factor).clamp_(SMALLEST_E4M3, FP8_MAX)
            yield torch.where(exact > 0, smaller, 1.0).to(FP8)
    elif weights.number.is_fp8:
        yield from (torch.where(largest * f > 0, largest * f, largest) for f in FACTORS)
    else:
        for factor in FACTORS:
            yield (largest.float() * factor).clamp_(min=SMALLEST_SCALE).to(largest.dtype)
