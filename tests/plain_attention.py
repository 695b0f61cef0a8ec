"""Attention spelled out, for drafts that are stepped without the product's passes."""

from torch import Tensor


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """softmax(q k^T * scale) v, key-value heads repeated to the number of query heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.mT) * scale
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v
