"""Rotary embedding: which frequencies turn, and which dimensions turn together."""

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Yarn scaling under the names of `rope_scaling` in a config.

    `mscale` and `mscale_all_dim` are equal in every known draft; then cos and sin keep their
    length, and only the softmax is sharpened.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 1.0
    beta_slow: float = 1.0
    mscale: float = 1.0

    def published_config(self) -> dict[str, object]:
        """The value of `rope_scaling`."""
        return {"type": "yarn", **asdict(self), "mscale_all_dim": self.mscale}

    def softmax_factor(self) -> float:
        """m^2 with m = 0.1 mscale ln(factor) + 1: once for queries, once for keys."""
        return (0.1 * self.mscale * math.log(self.factor) + 1) ** 2

    def frequencies(self, dim: int, theta: float) -> Tensor:
        """Plain frequencies for fast pairs, divided by `factor` for slow ones, a ramp between.

        Pair i turns original / (2 pi theta^(2i/dim)) times within the original context; the ramp
        runs between the pairs that turn beta_fast and beta_slow times, rounded outwards.
        """
        first = max(math.floor(self._pair_turning(self.beta_fast, dim, theta)), 0)
        last = min(math.ceil(self._pair_turning(self.beta_slow, dim, theta)), dim - 1)
        slow = ((torch.arange(dim // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
        plain = plain_frequencies(dim, theta)
        return plain * (1 - slow) + plain / self.factor * slow

    def _pair_turning(self, turns: float, dim: int, theta: float) -> float:
        wavelength = self.original_max_position_embeddings / (2 * math.pi * turns)
        return dim * math.log(wavelength) / (2 * math.log(theta))


def plain_frequencies(dim: int, theta: float) -> Tensor:
    """theta^(-2i/dim) of pair i: [dim / 2] float32, in radians per position."""
    return theta ** (-torch.arange(0, dim, 2).float() / dim)


def rotate(heads: Tensor, positions: Tensor, rope_theta: float) -> Tensor:
    """Plain rotary embedding, neox form: dimension i turns with dimension i + dim / 2.

    Args:
        heads: [..., R, dim] float32.
        positions: [R] int64.
        rope_theta: base of the frequencies.

    Returns:
        Same shape and dtype as `heads`.
    """
    frequencies = plain_frequencies(heads.shape[-1], rope_theta)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat(_turned(first, second, positions, frequencies), dim=-1)


def rotate_pairs(heads: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotary embedding, interleaved form: dimension 2i turns with dimension 2i + 1.

    Args:
        heads: [..., R, dim] float32.
        positions: [R] int64.
        frequencies: [dim / 2] float32.

    Returns:
        Same shape and dtype as `heads`.
    """
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack(_turned(even, odd, positions, frequencies), dim=-1).flatten(-2)


def _turned(
    first: Tensor, second: Tensor, positions: Tensor, frequencies: Tensor
) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return first * cos - second * sin, second * cos + first * sin
