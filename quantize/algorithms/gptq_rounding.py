"""GPTQ: columns are rounded one after the other, each making up for the errors of earlier ones.

The error of a linear's outputs over inputs x is the trace of E H Eᵀ, with E what rounding adds to
the weight and H the mean of x xᵀ. With H = L Lᵀ, L lower triangular, it is the sum over columns c
of ((E L)_c)^2: from the last column to the first, column c is rounded to make (E L)_c small, given
the errors of the columns after it. Scales are fixed beforehand. Errors reach the columns in three
steps, so that nearly all of the work is in products of matrices.

Source: Frantar et al., arXiv 2210.17323; in this form Chee et al., arXiv 2307.13304, theorem 6.
"""

import dataclasses

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.formats import FEW_BITS, NUMBER_FORMATS, WeightDtype
from ...recipes.schema import WeightFormat
from ..numerics.number_formats import nearest_codes, rounded_values, served_scale
from ..numerics.quantized_weight import QuantizedWeight
from .algorithm import Absmax, InputMoments, Moments, Need, RowAlgorithm, WeightAlgorithm, threads

_BLOCK, _PANEL = 256, 16
"""Columns between two products with all errors, and between two within a block. Measured on
7168 x 1024 and 14336 x 2304; 128 takes a sixth longer, panels of 8 and 32 as much."""
_ONE = torch.ones(())


class Gptq(RowAlgorithm):
    """Codes by GPTQ under the scales of another algorithm, whose codes are not used."""

    needs: Need = "second_moments"

    def __init__(self, scales: RowAlgorithm) -> None:
        self._scales = scales

    @override
    def problem(self, weights: WeightFormat) -> str | None:
        if weights.dtype not in FEW_BITS:
            return (
                f"rounding: gptq is for {', '.join(FEW_BITS)}: rounding to {weights.dtype}"
                " loses too little for it to improve"
            )
        return self._scales.problem(weights)

    @override
    def quantize(
        self, weight: Tensor, weights: WeightFormat, *, absmax: Absmax, moments: Moments
    ) -> QuantizedWeight:
        assert moments is not None  # `checked_measured` refused
        scaled = self._scales.quantize(weight, weights, absmax=absmax, moments=moments)
        with moments.all_threads():
            codes = _compensated(moments.corrected(weight), weights, scaled, moments)
        return dataclasses.replace(scaled, codes=codes.to(weight.device))


def _compensated(
    weight: Tensor, weights: WeightFormat, scales: QuantizedWeight, moments: InputMoments
) -> Tensor:
    """Codes [rows, in_features]; columns are rows in here. Nothing in here waits for the device."""
    feedback = moments.feedback()
    order, factor = feedback.order, feedback.factor
    served = served_scale(scales.scale, scales.global_scale).to(order.device).T
    groups = order // (scales.group_size or len(order))
    # First the weights; then, column by column, the errors of those that are rounded.
    columns = weight.T.index_select(0, order)
    codes = torch.empty_like(columns, dtype=scales.codes.dtype)
    for stop in range(len(order), 0, -_BLOCK):
        at = slice(max(0, stop - _BLOCK), stop)
        block = factor[at, at]
        diagonal = block.diagonal()
        wanted = factor[stop:, at].T @ columns[stop:]
        wanted = torch.addcdiv(columns[at], wanted, diagonal[:, None], value=-1)
        steps = served.index_select(0, groups[at])
        # Products too small to share: on a busy machine threads would wait for each other.
        with threads(1):
            _round_block(weights.dtype, wanted, columns[at], block / diagonal, steps)
        codes.index_copy_(0, order[at], nearest_codes(weights.dtype, wanted, _ONE, None))
    return codes.T.contiguous()


def _round_block(
    dtype: WeightDtype, wanted: Tensor, columns: Tensor, taps: Tensor, steps: Tensor
) -> None:
    """Round columns from the last to the first, panel by panel; all in place.

    Args:
        wanted: [columns, rows], the value wanted of each given the errors after the block; becomes
            the value wanted of each given all errors, in steps.
        columns: [columns, rows], the weights; they become the errors.
        taps: [columns, columns], lower triangular, ones on the diagonal.
        steps: [columns, rows], the scale of each.
    """
    integer = NUMBER_FORMATS[dtype].is_integer  # divided as `nearest_codes` divides
    divide, divisors = (torch.mul, steps.reciprocal()) if integer else (torch.div, steps)
    for stop in range(len(columns), 0, -_PANEL):
        start = max(0, stop - _PANEL)
        for k in range(stop - 1, start - 1, -1):
            target = wanted[k]
            target.addmv_(columns[k + 1 : stop].T, taps[k + 1 : stop, k], alpha=-1)
            divide(target, divisors[k], out=target)
            error = columns[k].neg_()
            error.addcmul_(rounded_values(dtype, target), steps[k])
        wanted[:start].addmm_(taps[start:stop, :start].T, columns[start:stop], alpha=-1)


class Learned(WeightAlgorithm):
    """Codes, and scales up to powers of two, from the gradient of the draft's loss."""

    needs: Need = "codes"

    @override
    def problem(self, weights: WeightFormat) -> str | None:
        if weights.dtype not in FEW_BITS:
            return (
                f"rounding: learned is for formats of four bits ({', '.join(FEW_BITS)}): rounding"
                " to 8 bits loses too little for it to improve"
            )
        if weights.first_stage is not None:
            return "rounding: learned does not work with values that are rounded in two stages"
        return None
