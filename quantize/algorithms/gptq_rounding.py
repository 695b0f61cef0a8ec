"""GPTQ: columns are rounded one after the other, each making up for the errors of those before.

The error of a linear's outputs over inputs x is the trace of E H Eᵀ, with E what rounding adds to
the weight and H the mean of x xᵀ. With H = R D Rᵀ, R upper triangular with ones on its diagonal, it
is the sum over columns k of D_k ((E R)_k)^2: column k is rounded to make (E R)_k small, given the
errors of the columns before it. Scales are fixed beforehand.

Source: Frantar et al., arXiv 2210.17323; in this form Chee et al., arXiv 2307.13304, theorem 6.
"""

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.formats import FEW_BITS
from ...recipes.schema import WeightFormat
from ..numerics.quantized_weight import QuantizedWeight, code_values
from ..numerics.rows import nearest_codes, served_scale
from .algorithm import Need, RowAlgorithm
from .input_moments import InputMoments

_COLUMNS = 128  # rounded between two matrix products


class Gptq(RowAlgorithm):
    """Codes by GPTQ under the scales of another algorithm.

    Args:
        scales: whose scales are taken; its codes are not.
    """

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
        self,
        weight: Tensor,
        weights: WeightFormat,
        *,
        absmax: Tensor | None,
        moments: InputMoments | None,
    ) -> QuantizedWeight:
        if moments is None:
            raise TypeError("gptq needs the second moments of the inputs")
        found = self._scales.quantize(weight, weights, absmax=absmax, moments=moments)
        codes = _compensated(weight.float(), weights, found, moments)
        return QuantizedWeight(
            codes=codes.to(weight.device),
            scale=found.scale,
            global_scale=found.global_scale,
            group_size=found.group_size,
        )


def _compensated(
    weight: Tensor, weights: WeightFormat, scales: QuantizedWeight, moments: InputMoments
) -> Tensor:
    """Codes [rows, in_features]; columns are rows in here, so that each lies in one piece."""
    feedback = moments.feedback()
    order, taps = feedback.order, feedback.taps
    columns = weight.to(order.device).T[order]
    scale = served_scale(scales.scale, scales.global_scale).to(order.device).T
    size = scales.group_size or weight.shape[1]
    groups = (order // size).tolist()
    codes = torch.empty_like(columns, dtype=scales.codes.dtype)
    errors = torch.empty_like(columns)
    for start in range(0, len(columns), _COLUMNS):
        stop = min(start + _COLUMNS, len(columns))
        wanted = columns[start:stop] - taps[:start, start:stop].T @ errors[:start]
        for k in range(start, stop):
            target = wanted[k - start] - taps[start:k, k] @ errors[start:k]
            step = scale[groups[k]]
            codes[k] = nearest_codes(weights.dtype, target[:, None], step[:, None], None)[:, 0]
            errors[k] = code_values(codes[k]) * step - columns[k]
    unordered = torch.empty_like(codes)
    unordered[order] = codes
    return unordered.T.contiguous()
