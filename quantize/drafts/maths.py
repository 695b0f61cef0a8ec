"""Building blocks of the drafts' forward maths, in torch.

Shapes: B sequences, T rows, H heads, D head width, W hidden width. Everything runs on the device of
the weights, in the dtype of the norms, and is differentiable. A product is computed in the
wider dtype of its matrix and its input. Norms and attention run at least in float32, as in engines.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...recipes.packages import LazyModule
from .rope import RopeConfig, rope_frequencies

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:  # importing a family loads no torch: the maths load it at their first operation
    torch, Tensor = LazyModule("torch"), Any

MAX_WIDENED = 2**24
"""Elements of a weight that are widened at a time: 64 MB in float32."""


def target_ids(d2t: Tensor | None) -> Tensor | None:
    """Target id of every draft id, from the offsets that d2t holds: id + d2t[id]; None = equal."""
    if d2t is None:
        return None
    return torch.arange(d2t.numel(), device=d2t.device) + d2t.to(torch.int64)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product of x [..., in] and weight [out, in] in the wider of the two dtypes, [..., out].

    A narrow weight is widened in parts, which changes only the rounding of the result, and not even
    that where one part is all: up to 16 M elements.
    """
    wide = torch.promote_types(x.dtype, weight.dtype)
    x = x.to(wide)
    if weight.dtype == wide:
        return torch.nn.functional.linear(x, weight)
    rows = max(1, MAX_WIDENED // weight.shape[1])
    parts = [torch.nn.functional.linear(x, part.to(wide)) for part in torch.split(weight, rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


Product = tuple[Tensor, Tensor]
"""Inputs [..., in_features] and a weight [out_features, in_features]: x weight^T."""


def sum_of(products: Sequence[Product]) -> Tensor:
    """The sum of products with equally many outputs, [..., out_features]."""
    outputs = [linear(x, weight) for x, weight in products]
    return sum(outputs[1:], start=outputs[0])


def largest_of(products: Sequence[Product], most: int) -> tuple[Tensor, Tensor]:
    """The largest outputs of `sum_of` and their indices, the first of equal ones, both [n].

    At most `most` outputs of n rows are held at once, or one column if that is more, so that a
    narrow weight is widened once.
    """
    count, width = len(products[0][0]), max(weight.shape[1] for _, weight in products)
    outputs = len(products[0][1])
    step = max(1, min(MAX_WIDENED // width, most // max(1, count)))
    top = ids = torch.empty(0)
    for start in range(0, outputs, step):
        parts = [(x, weight[start : start + step]) for x, weight in products]
        values, places = sum_of(parts).max(-1)
        if start == 0:
            top, ids = values, places
            continue
        larger = (values > top) | values.isnan()  # as max does, which treats NaN as the largest
        ids = torch.where(larger & ~top.isnan(), places + start, ids)
        top = torch.where(larger, values, top)
    return top, ids


def embedding(token_ids: Tensor, table: Tensor, dtype: "torch.dtype") -> Tensor:
    """Rows [..., W] of a table [V, W], which may be held in a narrower dtype."""
    return torch.nn.functional.embedding(token_ids, table).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Weight * x / sqrt(mean(x^2) + eps), the mean over the last axis in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, rope: RopeConfig, *, interleaved: bool = False) -> Tensor:
    """Rotary embedding: every pair of dimensions i of x [B, H, T, D] is turned by position * f_i.

    Positions are [T] int64, or [B, T] where the sequences are at different positions. Interleaved
    pairs are (2i, 2i + 1), as in DeepSeek; else (i, i + D/2), as in neox and Llama.
    """
    frequencies, factor = rope_frequencies(rope, x.shape[-1], x.device)
    angles = positions.to(torch.float64)[..., None] * frequencies
    if positions.ndim == 2:
        angles = angles[:, None]  # one for all heads
    cos, sin = (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
