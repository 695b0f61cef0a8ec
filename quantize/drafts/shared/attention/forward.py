"""Projections of attention: grouped-query, and multi-head latent (MLA) as engines serve it.

Sources of the latter: vLLM 0.33 `deepseek_v2.py` and `deepseek_scaling_rope.py`, SGLang 0.5.23
`deepseek_v2.py`, `rope_variant.py` and `model_config.py`. Both hand the draft's
`rms_norm_eps` to the norms of the latents (transformers 5.23 leaves them at 1e-6).
"""

import dataclasses
from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from ...forward import Modules
from ...maths import rotate
from ...rope import RopeConfig, Yarn, check_replayed, yarn_mscale
from ..eagle3.geometry import Eagle3MlaGeometry
from ..mtp.geometry import MtpLatentGeometry


class Attention(Protocol):
    """The projections of a family: input [B, T, W_in] -> rotated q, k, v and the softmax scale.

    Queries and keys are [B, H, T, D] and [B, KV, T, D], values [B, KV, T, D'].
    """

    @abstractmethod
    def project(
        self, prefix: str, x: Tensor, positions: Tensor, modules: Modules
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Project with the modules below `prefix` (for example "layers.0.self_attn.")."""


class LlamaAttention(Attention):
    """Grouped-query attention: q, k, v = W x, rope over the whole head, scale head_dim^-0.5.

    With `qk_norm`, as in Qwen3, an RMS norm over each head of q and k goes before the rope. Only
    the first `rotary_dim` elements of a head are rotated, if given.
    """

    def __init__(
        self, *, head_dim: int, rope: RopeConfig, qk_norm: bool = False, rotary_dim: int = 0
    ) -> None:
        self.head_dim = head_dim
        self.rope = check_replayed(rope)
        self.qk_norm = qk_norm
        self.rotary_dim = rotary_dim or head_dim

    @override
    def project(
        self, prefix: str, x: Tensor, positions: Tensor, modules: Modules
    ) -> tuple[Tensor, Tensor, Tensor, float]:

        def heads(name: str) -> Tensor:
            flat = modules.linear(prefix + name, x)
            return flat.view(*flat.shape[:-1], -1, self.head_dim).transpose(1, 2)

        q, k = heads("q_proj"), heads("k_proj")
        if self.qk_norm:
            q, k = modules.norm(prefix + "q_norm", q), modules.norm(prefix + "k_norm", k)
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        k, v = modules.cached(prefix, k, heads("v_proj"))
        return q, k, v, self.head_dim**-0.5

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.rotary_dim == self.head_dim:
            return rotate(x, positions, self.rope)
        turned = rotate(x[..., : self.rotary_dim], positions, self.rope)
        return torch.cat((turned, x[..., self.rotary_dim :]), dim=-1)


class MlaAttention(Attention):
    """q = q_b n(q_a x); [c; r] = kv_a x; [k; v] = kv_b n(c).

    A head's query and key are a plain part, then a rotated one; all heads share the rotated key
    part, the rotated r. The softmax scale is (plain + rotated width)^-0.5 times m^2: yarn's m once
    for the queries and once for the keys.
    """

    def __init__(self, geometry: Eagle3MlaGeometry | MtpLatentGeometry) -> None:
        self.geometry = geometry
        self.rope = served_rope(geometry.rope)
        width = geometry.qk_nope_head_dim + geometry.qk_rope_head_dim
        self.scale = width**-0.5 * softmax_mscale(geometry.rope) ** 2

    @override
    def project(
        self, prefix: str, x: Tensor, positions: Tensor, modules: Modules
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        g = self.geometry
        latent = modules.norm(prefix + "q_a_layernorm", modules.linear(prefix + "q_a_proj", x))
        queries = self._heads(modules.linear(prefix + "q_b_proj", latent))
        q_plain, q_turned = torch.split(queries, [g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)

        down = modules.linear(prefix + "kv_a_proj_with_mqa", x)
        latent, k_turned = torch.split(down, [g.kv_lora_rank, g.qk_rope_head_dim], dim=-1)
        latent = modules.norm(prefix + "kv_a_layernorm", latent)
        latent, k_turned = self._cached(prefix, latent, k_turned, positions, modules)
        up = self._heads(modules.kept_linear(prefix + "kv_b_proj", latent))
        k_plain, v = torch.split(up, [g.qk_nope_head_dim, g.v_head_dim], dim=-1)

        k_shared = k_turned[:, None].expand(-1, up.shape[1], -1, -1)
        q = torch.cat((q_plain, self._rotated(q_turned, positions)), dim=-1)
        return q, torch.cat((k_plain, k_shared), dim=-1), v, self.scale

    def _cached(
        self, prefix: str, latent: Tensor, k_turned: Tensor, positions: Tensor, modules: Modules
    ) -> tuple[Tensor, Tensor]:
        """Latent and rotated key part [B, T, D], read from a cache that keeps them as one entry.

        Source: `concat_and_cache_mla` of vLLM 0.33, `MLATokenToKVPool` of SGLang 0.5.23.
        """
        turned = self._rotated(k_turned[:, None], positions)
        entry = torch.cat((latent[:, None], turned), dim=-1)
        entry, _ = modules.cached(prefix, entry, entry[..., :0])
        widths = [latent.shape[-1], k_turned.shape[-1]]
        kept, rotated = torch.split(entry[:, 0], widths, dim=-1)
        return kept.contiguous(), rotated

    def _heads(self, flat: Tensor) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]."""
        return flat.view(*flat.shape[:-1], self.geometry.num_attention_heads, -1).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, self.rope, interleaved=self.geometry.rope_interleave)


def served_rope(rope: RopeConfig) -> RopeConfig:
    """The rope of MLA: engines build DeepSeek's own rotary class, not the yarn of Llama drafts.

    Its factor on cos and sin is mscale(f, mscale) / mscale(f, mscale_all_dim) with defaults 1 and
    0, and it rounds the ends of the ramp whatever `truncate` says.

    Raises:
        CheckpointError: engines disagree about it, or its maths is not known here.
    """
    yarn = check_replayed(rope).yarn
    if yarn is None:
        return rope
    mscale = 1.0 if yarn.mscale is None else yarn.mscale
    factor = yarn_mscale(yarn.factor, mscale) / _mscale_all_dim(yarn)
    served = dataclasses.replace(yarn, attention_factor=factor, truncate=True)
    return dataclasses.replace(rope, yarn=served)


def softmax_mscale(rope: RopeConfig) -> float:
    """Yarn's m = 0.1 mscale_all_dim ln(factor) + 1; 1 without yarn or without mscale_all_dim."""
    return 1.0 if rope.yarn is None else _mscale_all_dim(rope.yarn)


def _mscale_all_dim(yarn: Yarn) -> float:
    return yarn_mscale(yarn.factor, yarn.mscale_all_dim or 0.0)
