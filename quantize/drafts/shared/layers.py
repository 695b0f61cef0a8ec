"""Tensors of decoder layers, and attention as engines serve it: grouped-query, and latent (MLA).

Sources of the latter: vLLM 0.33 `deepseek_v2.py` and `deepseek_scaling_rope.py`, SGLang 0.5.23
`deepseek_v2.py`, `rope_variant.py` and `model_config.py`. Both hand the draft's `rms_norm_eps` to
the norms of the latents (transformers 5.23 leaves them at 1e-6).
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from typing_extensions import override

from ....recipes.schema import Role
from ..config_reader import ConfigReader
from ..family import Dim, TensorSpec
from ..forward import Attend, ModulesForward
from ..maths import Tensor, rotate, torch
from ..rope import RopeConfig, Yarn, check_replayed, read_rope, yarn_mscale

Shapes = dict[str, tuple[Role, tuple[Dim, ...]]]
"""Name below "layers.N." of a tensor, or of the module whose weight it is -> role and shape."""


def grouped_shapes(g: Any, width: Dim) -> Shapes:
    """Q, k, v and o of a geometry with num_key_value_heads and head_dim, over rows of a width."""
    queries = Dim(g.num_attention_heads * g.head_dim, "num_attention_heads x head_dim")
    keys = Dim(g.num_key_value_heads * g.head_dim, "num_key_value_heads x head_dim")
    return {
        "self_attn.q_proj": ("attention", (queries, width)),
        "self_attn.k_proj": ("attention", (keys, width)),
        "self_attn.v_proj": ("attention", (keys, width)),
        "self_attn.o_proj": ("attention", (Dim(g.hidden_size, "hidden_size"), queries)),
    }


def latent_shapes(g: Any, width: Dim) -> Shapes:
    """The projections of DeepSeek's latent attention, of a geometry with `read_latent`'s fields."""
    heads = g.num_attention_heads
    hidden = Dim(g.hidden_size, "hidden_size")
    q_latent = Dim(g.q_lora_rank, "q_lora_rank")
    kv_latent = Dim(g.kv_lora_rank, "kv_lora_rank")
    queries = Dim(
        heads * (g.qk_nope_head_dim + g.qk_rope_head_dim),
        "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)",
    )
    keys_values = Dim(
        heads * (g.qk_nope_head_dim + g.v_head_dim),
        "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
    )
    values = Dim(heads * g.v_head_dim, "num_attention_heads x v_head_dim")
    down = Dim(g.kv_lora_rank + g.qk_rope_head_dim, "kv_lora_rank + qk_rope_head_dim")
    return {
        "self_attn.q_a_proj": ("attention", (q_latent, width)),
        "self_attn.q_a_layernorm": ("norm", (q_latent,)),
        "self_attn.q_b_proj": ("attention", (queries, q_latent)),
        "self_attn.kv_a_proj_with_mqa": ("attention", (down, width)),
        "self_attn.kv_a_layernorm": ("norm", (kv_latent,)),
        "self_attn.kv_b_proj": ("kv_up", (keys_values, kv_latent)),
        "self_attn.o_proj": ("attention", (hidden, values)),
    }


def head_norm_shapes(g: Any) -> Shapes:
    """The norms of each head's query and key."""
    head = Dim(g.head_dim, "head_dim")
    return {f"self_attn.{name}_norm": ("norm", (head,)) for name in ("q", "k")}


def input_bias_shapes(linears: Shapes) -> Shapes:
    """Biases of q, k and v, by whole names; vectors are kept as norms are."""
    names = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    return {f"{name}.bias": ("norm", linears[name][1][:1]) for name in names}


def mlp_shapes(prefix: str, inner: Dim, hidden: Dim) -> Shapes:
    """The three linears of one MLP."""
    return {
        f"{prefix}gate_proj": ("mlp", (inner, hidden)),
        f"{prefix}up_proj": ("mlp", (inner, hidden)),
        f"{prefix}down_proj": ("mlp", (hidden, inner)),
    }


def layer_norm_shapes(hidden: Dim) -> Shapes:
    """The norms in front of attention and MLP."""
    names = ("input_layernorm", "post_attention_layernorm")
    return {name: ("norm", (hidden,)) for name in names}


def weight_names(shapes: Shapes) -> Shapes:
    """The same by the names of the weights."""
    return {f"{name}.weight": row for name, row in shapes.items()}


def layer_specs(layer: int, shapes: Shapes) -> dict[str, TensorSpec]:
    """The tensors of a layer, from their names within it."""
    return {
        f"layers.{layer}.{name}": TensorSpec(role=role, shape=shape)
        for name, (role, shape) in shapes.items()
    }


def vocabulary_specs(
    g: Any, around: Mapping[str, TensorSpec], *, head_optional: bool
) -> dict[str, TensorSpec]:
    """Embedding, head, maps and what stands around the layers, of a draft whose head may be cut."""
    hidden, vocab = Dim(g.hidden_size, "hidden_size"), Dim(g.vocab_size, "vocab_size")
    own = Dim(g.draft_vocab_size, "draft_vocab_size")
    full = g.draft_vocab_size == g.vocab_size
    role: Role = "vocabulary_map"
    return {
        "embed_tokens.weight": TensorSpec(role="embedding", shape=(vocab, hidden), optional=True),
        "lm_head.weight": TensorSpec(role="head", shape=(own, hidden), optional=head_optional),
        **around,
        "d2t": TensorSpec(role=role, shape=(own,), dtypes=("I64", "I32"), optional=full),
        "t2d": TensorSpec(role=role, shape=(vocab,), dtypes=("BOOL",), optional=True),
    }


def read_sizes(keys: ConfigReader, layers: int | None = None) -> dict[str, Any]:
    """What is alike in every geometry; as many layers as are given, or as config.json says."""
    return {
        "hidden_size": keys.positive("hidden_size"),
        "num_attention_heads": keys.positive("num_attention_heads"),
        "vocab_size": keys.positive("vocab_size"),
        "num_layers": layers or keys.positive("num_hidden_layers"),
        "intermediate_size": keys.positive("intermediate_size"),
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "rope": read_rope(keys.config, keys.where),
    }


def read_heads(keys: ConfigReader, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of grouped-query attention; without a key each head has keys of its own."""
    heads = sizes["num_attention_heads"]
    return {
        "head_dim": keys.positive("head_dim", sizes["hidden_size"] // heads),
        "num_key_value_heads": keys.positive("num_key_value_heads", heads),
    }


def read_latent(keys: ConfigReader) -> dict[str, Any]:
    """The fields of a geometry of latent attention, from config.json."""
    return {
        "q_lora_rank": keys.positive("q_lora_rank"),
        "kv_lora_rank": keys.positive("kv_lora_rank"),
        "qk_nope_head_dim": keys.positive("qk_nope_head_dim"),
        "qk_rope_head_dim": keys.even("qk_rope_head_dim"),
        "v_head_dim": keys.positive("v_head_dim"),
        "rope_interleave": keys.flag("rope_interleave", True),
    }


def check_silu(keys: ConfigReader, family: str) -> None:
    """Refuse another activation than engines serve."""
    activation = keys.config.get("hidden_act", "silu")
    if activation != "silu":
        raise keys.refused(
            f"hidden_act: expected 'silu', as {family} is served, got {activation!r}",
            fix="use another draft: this one cannot be replayed or served as it was trained",
        )


class Projected(NamedTuple):
    """Queries [B, H, T, D], keys [B, KV, T, D], both rotated, and values [B, KV, T, D'].

    `scale` multiplies the scores, `gate` [B, T, H * D'] what the heads saw; None = 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    gate: Tensor | None = None


class Attention(ABC):
    """The attention of a family, between its projections and o_proj."""

    @abstractmethod
    def project(
        self, prefix: str, x: Tensor, positions: Tensor, modules: ModulesForward
    ) -> Projected:
        """Project rows [B, T, W] with the modules below `prefix`, "layers.0.self_attn."."""

    def output(
        self,
        layer: int,
        prefix: str,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        modules: ModulesForward,
    ) -> Tensor:
        """What o_proj gives, [B, T, W]."""
        q, k, v, scale, gate = self.project(prefix, x, positions, modules)
        mixed = attend(layer, q, k, v, scale).transpose(1, 2).flatten(2)
        return modules.linear(f"{prefix}o_proj", mixed if gate is None else mixed * gate)


class LlamaAttention(Attention):
    """Grouped-query attention: q, k, v = W x, rope, scale head_dim^-0.5.

    Attributes:
        qk_norm: an RMS norm over each head of q and k goes before the rope, as in Qwen3.
        rotary_dim: only the first so many elements of a head are rotated.
        gate: the sigmoid of what multiplies the output: "elements", which q_proj gives behind the
            query of each head (Qwen3-Next); "heads", one number of g_proj for each (Step-3.5).
    """

    def __init__(self, geometry: Any) -> None:
        self.head_dim = geometry.head_dim
        self.rope = check_replayed(geometry.rope)
        self.qk_norm = geometry.qk_norm
        self.rotary_dim = getattr(geometry, "rotary_dim", 0) or geometry.head_dim
        self.gate: Literal["elements", "heads"] | None = getattr(geometry, "gate", None)

    @override
    def project(
        self, prefix: str, x: Tensor, positions: Tensor, modules: ModulesForward
    ) -> Projected:
        def heads(flat: Tensor) -> Tensor:
            return flat.view(*flat.shape[:-1], -1, self.head_dim).transpose(1, 2)

        queries, gate = modules.linear(f"{prefix}q_proj", x), None
        if self.gate == "elements":
            both = queries.view(*x.shape[:-1], -1, 2, self.head_dim)
            queries, gate = (part.flatten(-2) for part in both.unbind(-2))
            gate = gate.sigmoid()
        elif self.gate == "heads":
            each = modules.kept_linear(f"{prefix}g_proj", x).to(x.dtype)
            gate = each.sigmoid().repeat_interleave(self.head_dim, dim=-1)
        q, k = heads(queries), heads(modules.linear(f"{prefix}k_proj", x))
        if self.qk_norm:
            q, k = modules.norm(f"{prefix}q_norm", q), modules.norm(f"{prefix}k_norm", k)
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        k, v = modules.cached(prefix, k, heads(modules.linear(f"{prefix}v_proj", x)))
        return Projected(q, k, v, self.head_dim**-0.5, gate)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.rotary_dim == self.head_dim:
            return rotate(x, positions, self.rope)
        turned = rotate(x[..., : self.rotary_dim], positions, self.rope)
        return torch.cat((turned, x[..., self.rotary_dim :]), dim=-1)


class MlaAttention(Attention):
    """q = q_b n(q_a x); [c; r] = kv_a x; [k; v] = kv_b n(c), of `read_latent`'s fields.

    A head's query and key are a plain part, then a rotated one; all heads share the rotated key
    part, the rotated r. The softmax scale is (plain + rotated width)^-0.5 times m^2: yarn's m once
    for the queries and once for the keys.
    """

    def __init__(self, geometry: Any) -> None:
        self.geometry = geometry
        self.rope = served_rope(geometry.rope)
        width = geometry.qk_nope_head_dim + geometry.qk_rope_head_dim
        self.scale = width**-0.5 * softmax_mscale(geometry.rope) ** 2

    @override
    def project(
        self, prefix: str, x: Tensor, positions: Tensor, modules: ModulesForward
    ) -> Projected:
        g = self.geometry
        latent = modules.norm(prefix + "q_a_layernorm", modules.linear(prefix + "q_a_proj", x))
        queries = self._heads(modules.linear(prefix + "q_b_proj", latent))
        q_plain, q_turned = torch.split(queries, [g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)

        down = modules.linear(prefix + "kv_a_proj_with_mqa", x)
        latent, k_turned = torch.split(down, [g.kv_lora_rank, g.qk_rope_head_dim], dim=-1)
        latent = modules.norm(prefix + "kv_a_layernorm", latent)
        # One cache entry: vLLM 0.33 `concat_and_cache_mla`, SGLang 0.5.23 `MLATokenToKVPool`.
        entry = torch.cat((latent[:, None], self._rotated(k_turned[:, None], positions)), dim=-1)
        entry, _ = modules.cached(prefix, entry, entry[..., :0])
        latent, k_turned = torch.split(entry[:, 0], [g.kv_lora_rank, g.qk_rope_head_dim], dim=-1)
        up = self._heads(modules.kept_linear(prefix + "kv_b_proj", latent.contiguous()))
        k_plain, v = torch.split(up, [g.qk_nope_head_dim, g.v_head_dim], dim=-1)
        k_shared = k_turned[:, None].expand(-1, up.shape[1], -1, -1)
        q = torch.cat((q_plain, self._rotated(q_turned, positions)), dim=-1)
        return Projected(q, torch.cat((k_plain, k_shared), dim=-1), v, self.scale)

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.view(*flat.shape[:-1], self.geometry.num_attention_heads, -1).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, self.rope, interleaved=self.geometry.rope_interleave)


def served_rope(rope: RopeConfig) -> RopeConfig:
    """The rope of MLA: engines build DeepSeek's own rotary class, not the yarn of Llama drafts.

    Its factor on cos and sin is mscale(f, mscale) / mscale(f, mscale_all_dim) with defaults 1 and
    0, and it rounds the ends of the ramp whatever `truncate` says.
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
