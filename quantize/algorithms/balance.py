"""Balancing the concat input: an exact change of scale between a norm and the columns behind it.

The first linears of EAGLE-3 read [norm(embedding); norm(hidden)]. Multiplying the embedding's
columns by 2^k and dividing the norm's weight by 2^k leaves the network as it is, bit for bit, and
lets both halves share one scale per row.
"""

import torch
from torch import Tensor

from ..errors import BackendError


def divide_norm(norm: Tensor, exponent: int, name: str) -> Tensor:
    """A norm's weight [width] divided by 2^exponent, in its dtype.

    Raises:
        BackendError: the dtype cannot hold the result exactly.
    """
    return _scaled(norm, -exponent, name)


def multiply_columns(rows: Tensor, exponent: int, name: str) -> None:
    """Multiply the first half of the columns of a block [rows, in_features] in place.

    Raises:
        BackendError: the dtype cannot hold the result exactly.
    """
    half = rows[:, : rows.shape[1] // 2]
    half.copy_(_scaled(half, exponent, name))


def _scaled(values: Tensor, exponent: int, name: str) -> Tensor:
    factor = torch.tensor(2.0**exponent, dtype=torch.float64)
    exact = values.double() * factor
    scaled = exact.to(values.dtype)
    if bool(((scaled.double() != exact) & exact.isfinite()).any()):
        raise BackendError(
            name,
            f"it cannot be multiplied by 2^{exponent} exactly in {values.dtype}, as"
            " balancing the two halves of the concatenated input requires",
            fix="use a recipe with 'balance_concat: off', or store the draft in float32",
        )
    return scaled
