"""GPTQ as its paper has it, slow and exact, and inputs on which it differs from nearest codes."""

import torch
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.numerics.number_formats import nearest_codes, served_scale
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight, code_values
from draftquant.recipes import WeightFormat
from torch import Tensor


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def inputs(columns: int, number: int = 400) -> Tensor:
    """Inputs of very different sizes that depend on each other: [number, columns]."""
    mixing = gaussian(columns, columns, seed=1) / columns**0.5
    sizes = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=torch.manual_seed(2))]
    return (gaussian(number, columns, seed=3) @ mixing + gaussian(number, 1, seed=4)) * sizes


def moments_of(x: Tensor) -> InputMoments:
    return InputMoments(x.T @ x / len(x))


def textbook(
    w: Tensor, weights: WeightFormat, found: QuantizedWeight, x: Tensor, *, ordered: bool = True
) -> Tensor:
    """Algorithm of arXiv 2210.17323 in float64, column by column with the whole inverse.

    After each column the rest of the weight is changed as the inverse says, and the column is
    eliminated from it. Columns go in the order of their inputs' mean squares, or as they stand.
    """
    h = (x.T @ x / len(x)).double()
    h += 0.01 * h.diagonal().mean() * torch.eye(len(h))
    order = (x.T @ x / len(x)).diagonal().argsort(descending=True, stable=True)
    if not ordered:
        order = torch.arange(len(h))
    rest, inverse = w.double().clone(), torch.linalg.inv(h)
    size = found.group_size or w.shape[1]
    codes = torch.zeros_like(found.codes)
    for column in order.tolist():
        step = served_scale(found.scale, found.global_scale)[:, column // size, None]
        codes[:, column] = nearest_codes(
            weights.dtype, rest[:, column, None].float(), step, None
        )[:, 0]  # fmt: skip
        value = (code_values(codes[:, column]) * step[:, 0]).double()
        error = (rest[:, column] - value) / inverse[column, column]
        rest -= error[:, None] * inverse[column]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes
