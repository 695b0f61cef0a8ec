"""Building blocks of the drafts' forward maths, in torch.

Shapes: B sequences, T rows, H heads, D head width, W hidden width. Everything runs in the dtype of
the weights that it is given; norms and softmax in at least float32.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .rope import RopeConfig, rope_frequencies

OnInput = Callable[[str, Tensor], Tensor]
"""Called with (canonical module name, input [..., in_features]) before every attention and MLP
linear; what it returns is multiplied by the weight. Rounds activations, or observes them."""

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Attention over whatever keys the caller keeps: (layer, q [B,H,T,D], k [B,KV,T,D], v [B,KV,T,D'],
softmax scale) -> [B,H,T,D']."""


class ChainForward(Protocol):
    """A draft that proposes a chain: a step reads a token and the hidden state of the last step."""

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, num_aux * W_target] -> first hidden states [B, T, W]."""

    def step(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            token_ids: [B, T] int64, target vocabulary.
            hidden: [B, T, W], from `fuse` at depth 1, from the step before after that.
            positions: [T] int64.
            attend: attention over the caller's keys.

        Returns:
            (logits [B, T, draft vocabulary], hidden states [B, T, W] for the next step).
        """

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target-vocabulary ids, same shape."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Weight * x / sqrt(mean(x^2) + eps), the mean over the last axis in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, rope: RopeConfig) -> Tensor:
    """Rotary embedding with rotated halves (neox style).

    Args:
        x: [B, H, T, D].
        positions: [T] int64.
        rope: base and scaling of the frequencies.

    Returns:
        [B, H, T, D]: pair (i, i + D/2) turned by the angle positions * frequency_i.
    """
    frequencies, factor = rope_frequencies(rope, x.shape[-1])
    angles = positions.to(torch.float64)[:, None] * frequencies
    cos, sin = (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """softmax(q k^T * scale) v, key-value heads repeated to the number of query heads.

    Args:
        q: [B, H, T, D].
        k: [B, KV, S, D].
        v: [B, KV, S, D'].
        scale: multiplies q k^T.
        visible: [T, S] bool, True where a query may look.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(q.dtype) @ v
