"""Rotary position embedding: reading its config, and its frequencies (default and yarn).

Sources: transformers `modeling_rope_utils`, vLLM 0.33 `yarn_scaling_rope.py`. Both spellings of the
config are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .config_reader import ConfigReader

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Yarn scaling: position range stretched by `factor` beyond `original_max_positions`."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    attention_factor: float | None
    truncate: bool = True
    """Round the ends of the ramp to whole pairs; gpt-oss style configs say false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Base of the frequencies and, for long contexts, the yarn scaling (None = plain rope)."""

    theta: float
    yarn: Yarn | None


def read_rope(config: Mapping[str, Any], where: object) -> RopeConfig:
    """Read the rope keys of a draft's config.

    Raises:
        CheckpointError: no rope base, or a rope type whose maths is not known here.
    """
    keys = ConfigReader(config, where)
    modern = keys.section("rope_parameters")
    scaling = keys.section("rope_scaling") if config.get("rope_scaling") else modern
    theta = (modern if "rope_theta" in modern.config else keys).number("rope_theta")
    kind = scaling.config.get("rope_type", scaling.config.get("type", "default"))
    if kind in (None, "default"):
        return RopeConfig(theta=theta, yarn=None)
    if kind != "yarn":
        raise CheckpointError(
            scaling.where,
            f"rope type {kind!r} is not one of 'default', 'yarn'",
            fix="only these two are known to be served for drafts",
        )
    all_dim = "mscale_all_dim"
    yarn = Yarn(
        factor=scaling.number("factor"),
        original_max_positions=scaling.positive("original_max_position_embeddings"),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=_optional(scaling, "mscale"),
        # 0 is DeepSeek's way to say none.
        mscale_all_dim=None if scaling.config.get(all_dim) == 0 else _optional(scaling, all_dim),
        attention_factor=_optional(scaling, "attention_factor"),
        truncate=scaling.flag("truncate", True),
    )
    return RopeConfig(theta=theta, yarn=yarn)


def yarn_mscale(factor: float, mscale: float) -> float:
    """mscale(f, m) = 0.1 m ln f + 1 for f > 1, else 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_frequencies(
    rope: RopeConfig, dim: int, device: "torch.device | None" = None
) -> "tuple[torch.Tensor, float]":
    """Angular frequencies of the dim/2 rotated pairs and the factor on cos and sin.

    default: f_i = theta^(-2i/dim). yarn blends f_i (fast pairs) and f_i / factor (slow pairs)
    linearly between the pairs that turn beta_fast and beta_slow times within the original context.

    Returns:
        ([dim / 2] float64, attention factor).
    """
    import torch

    pairs = torch.arange(dim // 2, dtype=torch.float64, device=device)
    frequencies = rope.theta ** (-2 * pairs / dim)
    yarn = rope.yarn
    if yarn is None:
        return frequencies, 1.0

    def pair_turning(turns: float) -> float:
        wavelength = yarn.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, dim - 1)
    # An empty ramp becomes a step, as in transformers; a reversed one keeps every pair fast.
    ramp = (pairs - low) / ((high - low) or 0.001)
    slow = ramp.clamp(0, 1)
    blended = frequencies * (1 - slow) + frequencies / yarn.factor * slow
    return blended, _attention_factor(yarn)


def _attention_factor(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor, 1.0)


def _optional(keys: ConfigReader, key: str) -> float | None:
    return keys.number(key) if keys.config.get(key) is not None else None
