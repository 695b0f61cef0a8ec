"""Decoder layers as engines serve them: their tensors and maths, with attention of two kinds.

Sources of MLA: vLLM 0.33 `deepseek_v2.py` and `deepseek_scaling_rope.py`, SGLang
0.5.23 `deepseek_v2.py`, `rope_variant.py` and `model_config.py`. Both pass the draft's
`rms_norm_eps` to the norms of the latents (transformers 5.23 leaves them at 1e-6).
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from ....recipes.errors import CheckpointError
from ....recipes.schema import Role
from ..config_reader import ConfigReader
from ..family import Dim, TensorSpec
from ..forward import Attend, ModulesForward, OnInput, gated_mlp
from ..geometry import GroupedAttention, Indexer, LatentAttention, RotatedGeometry
from ..maths import Tensor, rotate, torch
from ..rope import RopeConfig, Yarn, check_replayed, of_latent_attention, read_rope, yarn_mscale

Shapes = dict[str, tuple[Role, tuple[Dim, ...]]]
"""Name of a tensor -> role and shape."""


def dims(g: Any, *names: str) -> tuple[Dim, ...]:
    """Sizes of a geometry that have the same names in config.json."""
    return tuple(Dim(getattr(g, name), name) for name in names)


def attention_shapes(g: RotatedGeometry, width: Dim) -> Shapes:
    """The tensors of a layer's attention, for rows of a width; vectors are kept, as norms are."""
    a = g.attention
    shapes = _latent(g, a, width) if isinstance(a, LatentAttention) else _grouped(g, a, width)
    return {f"self_attn.{name}": row for name, row in shapes.items()}


def _grouped(g: RotatedGeometry, a: GroupedAttention, width: Dim) -> Shapes:
    hidden, heads, head = *dims(g, "hidden_size", "num_attention_heads"), *dims(a, "head_dim")
    queries = Dim(g.num_attention_heads * a.head_dim, "num_attention_heads x head_dim")
    keys = Dim(a.num_key_value_heads * a.head_dim, "num_key_value_heads x head_dim")
    asked = queries
    if a.gate == "elements":
        asked = Dim(2 * queries.size, f"2 x {queries.follows_from}")
    inputs = {"q_proj": asked, "k_proj": keys, "v_proj": keys}
    shapes: Shapes = {f"{name}.weight": ("attention", (out, width)) for name, out in inputs.items()}
    shapes["o_proj.weight"] = ("attention", (hidden, queries))
    if a.input_bias:
        shapes |= {f"{name}.bias": ("norm", (out,)) for name, out in inputs.items()}
    if a.output_bias:
        shapes["o_proj.bias"] = ("norm", (hidden,))
    if a.qk_norm:
        shapes |= {f"{name}_norm.weight": ("norm", (head,)) for name in ("q", "k")}
    if a.gate == "heads":
        shapes["g_proj.weight"] = ("router", (heads, hidden))
    if a.sinks:
        shapes["attention_sink_bias"] = ("norm", (heads,))
    return shapes


def _latent(g: RotatedGeometry, a: LatentAttention, width: Dim) -> Shapes:
    heads = g.num_attention_heads
    hidden, q_latent, kv_latent = *dims(g, "hidden_size"), *dims(a, "q_lora_rank", "kv_lora_rank")
    queries = Dim(
        heads * (a.qk_nope_head_dim + a.qk_rope_head_dim),
        "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)",
    )
    keys_values = Dim(
        heads * (a.qk_nope_head_dim + a.v_head_dim),
        "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
    )
    values = Dim(heads * a.v_head_dim, "num_attention_heads x v_head_dim")
    down = Dim(a.kv_lora_rank + a.qk_rope_head_dim, "kv_lora_rank + qk_rope_head_dim")
    indexer = {} if a.indexer is None else _indexer(a.indexer, width, q_latent)
    return {
        **indexer,
        "q_a_proj.weight": ("attention", (q_latent, width)),
        "q_a_layernorm.weight": ("norm", (q_latent,)),
        "q_b_proj.weight": ("attention", (queries, q_latent)),
        "kv_a_proj_with_mqa.weight": ("attention", (down, width)),
        "kv_a_layernorm.weight": ("norm", (kv_latent,)),
        "kv_b_proj.weight": ("kv_up", (keys_values, kv_latent)),
        "o_proj.weight": ("attention", (hidden, values)),
    }


def _indexer(i: Indexer, width: Dim, latent: Dim) -> Shapes:
    heads, head = Dim(i.num_heads, "index_n_heads"), Dim(i.head_dim, "index_head_dim")
    queries = Dim(i.num_heads * i.head_dim, "index_n_heads x index_head_dim")
    shapes = {"wq_b": (queries, latent), "wk": (head, width), "weights_proj": (heads, width)}
    norms: Shapes = {f"indexer.k_norm.{name}": ("norm", (head,)) for name in ("weight", "bias")}
    return norms | {f"indexer.{name}.weight": ("indexer", shape) for name, shape in shapes.items()}


def mlp_shapes(prefix: str, inner: Dim, hidden: Dim) -> Shapes:
    """The three linears of one MLP."""
    return {
        f"{prefix}gate_proj.weight": ("mlp", (inner, hidden)),
        f"{prefix}up_proj.weight": ("mlp", (inner, hidden)),
        f"{prefix}down_proj.weight": ("mlp", (hidden, inner)),
    }


def layer_specs(
    g: RotatedGeometry, number: int, *, width: Dim | None = None, mlp: Shapes | None = None
) -> dict[str, TensorSpec]:
    """The tensors of a decoder layer, whose attention reads rows of a width; None = its own."""
    hidden, inner = dims(g, "hidden_size", "intermediate_size")
    shapes = attention_shapes(g, width or hidden) | (mlp or mlp_shapes("mlp.", inner, hidden))
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{norm}.weight"] = ("norm", (hidden,))
    return {
        f"layers.{number}.{name}": TensorSpec(role=role, shape=shape)
        for name, (role, shape) in shapes.items()
    }


def vocabulary_specs(
    g: Any, around: Mapping[str, TensorSpec], *, head_optional: bool
) -> dict[str, TensorSpec]:
    """Embedding, head, maps and tensors around the layers, for a draft whose head may be cut."""
    hidden, vocab, rows = dims(g, "hidden_size", "vocab_size", "draft_vocab_size")
    full = g.draft_vocab_size == g.vocab_size
    role: Role = "vocabulary_map"
    return {
        "embed_tokens.weight": TensorSpec(role="embedding", shape=(vocab, hidden), optional=True),
        "lm_head.weight": TensorSpec(role="head", shape=(rows, hidden), optional=head_optional),
        **around,
        "d2t": TensorSpec(role=role, shape=(rows,), dtypes=("I64", "I32"), optional=full),
        "t2d": TensorSpec(role=role, shape=(vocab,), dtypes=("BOOL",), optional=True),
    }


def read_sizes(
    keys: ConfigReader, layers: int | None = None, part: float | None = None
) -> dict[str, Any]:
    """The sizes that every geometry has; `layers` is their number, None = by config.json.

    `part`: as in `read_rope`.
    """
    sizes = ("hidden_size", "num_attention_heads", "vocab_size")
    return {
        **{name: keys.positive(name) for name in sizes},
        "num_layers": layers or keys.positive("num_hidden_layers"),
        "intermediate_size": keys.positive("intermediate_size"),
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "rope": read_rope(keys.config, keys.where, part),
    }


def read_heads(keys: ConfigReader, sizes: Mapping[str, Any], **how: Any) -> GroupedAttention:
    """Without a key each head has its own keys."""
    heads = sizes["num_attention_heads"]
    head_dim = keys.positive("head_dim", sizes["hidden_size"] // heads)
    return GroupedAttention(
        num_key_value_heads=keys.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * sizes["rope"].part),
        **how,
    )


def with_latent(
    keys: ConfigReader, sizes: Mapping[str, Any], indexer: Indexer | None = None
) -> dict[str, Any]:
    """The sizes with MLA, and the rope that engines serve the same for it."""
    ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")
    attention = LatentAttention(
        **{name: keys.positive(name) for name in ranks},
        qk_rope_head_dim=keys.even("qk_rope_head_dim"),
        v_head_dim=keys.positive("v_head_dim"),
        rope_interleave=keys.flag("rope_interleave", True),
        indexer=indexer,
    )
    rope = of_latent_attention(sizes["rope"], keys.where)
    return {**sizes, "rope": rope, "attention": attention}


def check_silu(keys: ConfigReader, family: str) -> None:
    """Refuse an activation that engines do not serve."""
    got = keys.config.get("hidden_act", "silu")
    if got != "silu":
        raise CheckpointError(
            keys.where,
            f"hidden_act: expected 'silu', as {family} is served, got {got!r}",
            fix="use another draft: this one cannot be replayed or served as it was trained",
        )


class Projected(NamedTuple):
    """Queries [B, H, T, D], keys [B, KV, T, D], both rotated, and values [B, KV, T, D'].

    `scale` multiplies the scores, `gate` [B, T, H * D'] the heads' output; None = 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    gate: Tensor | None = None


class Attention(ABC):
    """The attention of a draft, between its projections and o_proj."""

    @abstractmethod
    def project(self, layer: int, x: Tensor, at: Tensor, modules: ModulesForward) -> Projected:
        """Project rows [B, T, W] at positions `at` with the linears of a layer."""

    @abstractmethod
    def keys_values(
        self, layer: int, x: Tensor, at: Tensor, modules: ModulesForward
    ) -> tuple[Tensor, Tensor]:
        """Keys [B, KV, T, D] and values [B, KV, T, D'] of rows [B, T, W], as they are cached."""

    def output(
        self, layer: int, x: Tensor, at: Tensor, attend: Attend, modules: ModulesForward
    ) -> Tensor:
        """The output of o_proj, [B, T, W]."""
        q, k, v, scale, gate = self.project(layer, x, at, modules)
        mixed = attend(layer, q, k, v, scale).transpose(1, 2).flatten(2)
        mixed = mixed if gate is None else mixed * gate
        return modules.linear(f"layers.{layer}.self_attn.o_proj", mixed)


class LlamaAttention(Attention):
    """Grouped-query attention: q, k, v = W x, rope, scale head_dim^-0.5."""

    def __init__(self, geometry: RotatedGeometry) -> None:
        assert isinstance(geometry.attention, GroupedAttention)
        self.attention = geometry.attention
        self.rope = check_replayed(geometry.rope)

    @override
    def project(self, layer: int, x: Tensor, at: Tensor, modules: ModulesForward) -> Projected:
        prefix, head_dim = f"layers.{layer}.self_attn.", self.attention.head_dim
        queries, gate = modules.linear(f"{prefix}q_proj", x), None
        if self.attention.gate == "elements":
            both = queries.view(*x.shape[:-1], -1, 2, head_dim)
            queries, gate = (part.flatten(-2) for part in both.unbind(-2))
            gate = gate.sigmoid()
        elif self.attention.gate == "heads":
            each = modules.kept_linear(f"{prefix}g_proj", x).to(x.dtype)
            gate = each.sigmoid().repeat_interleave(head_dim, dim=-1)
        q = self.turned(f"{prefix}q_norm", queries, at, modules)
        k, v = self.keys_values(layer, x, at, modules)
        return Projected(q, k, v, head_dim**-0.5, gate)

    @override
    def keys_values(
        self, layer: int, x: Tensor, at: Tensor, modules: ModulesForward
    ) -> tuple[Tensor, Tensor]:
        prefix = f"layers.{layer}.self_attn."
        keys, values = (modules.linear(f"{prefix}{name}_proj", x) for name in ("k", "v"))
        return self.cached(layer, keys, values, at, modules)

    def cached(
        self, layer: int, keys: Tensor, values: Tensor, at: Tensor, modules: ModulesForward
    ) -> tuple[Tensor, Tensor]:
        """The same of projected rows [B, T, KV * D]."""
        k = self.turned(f"layers.{layer}.self_attn.k_norm", keys, at, modules)
        scale = self.attention.value_scale
        return modules.on_cache(layer, k, self._heads(values if scale == 1 else values * scale))

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.view(*flat.shape[:-1], -1, self.attention.head_dim).transpose(1, 2)

    def turned(self, norm: str, flat: Tensor, at: Tensor, modules: ModulesForward) -> Tensor:
        """Projected rows [B, T, H * D] as heads [B, H, T, D], normed and rotated."""
        x, rotated = self._heads(flat), self.attention.rotary_dim
        x = modules.norm(norm, x) if self.attention.qk_norm else x
        turned = rotate(x[..., :rotated], at, self.rope)
        return torch.cat((turned, x[..., rotated:]), dim=-1) if rotated < x.shape[-1] else turned


class MlaAttention(Attention):
    """q = q_b n(q_a x); [c; r] = kv_a x; [k; v] = kv_b n(c).

    A head's query and key have a plain part, then a rotated one; all heads share the rotated key
    part, the rotated r. The softmax scale is (plain + rotated width)^-0.5 times m^2: yarn's m once
    for the queries and once for the keys.
    """

    def __init__(self, geometry: RotatedGeometry) -> None:
        assert isinstance(geometry.attention, LatentAttention)
        self.attention = a = geometry.attention
        self.num_heads = geometry.num_attention_heads
        self.rope = served_rope(geometry.rope)
        width = a.qk_nope_head_dim + a.qk_rope_head_dim
        self.scale = width**-0.5 * softmax_mscale(geometry.rope) ** 2

    @override
    def project(self, layer: int, x: Tensor, at: Tensor, modules: ModulesForward) -> Projected:
        a, prefix = self.attention, f"layers.{layer}.self_attn."
        widths = [a.qk_nope_head_dim, a.qk_rope_head_dim]
        latent = modules.norm(prefix + "q_a_layernorm", modules.linear(prefix + "q_a_proj", x))
        queries = self._heads(modules.linear(prefix + "q_b_proj", latent))
        q_plain, q_turned = torch.split(queries, widths, dim=-1)
        q = torch.cat((q_plain, self._rotated(q_turned, at)), dim=-1)
        return Projected(q, *self.keys_values(layer, x, at, modules), self.scale)

    @override
    def keys_values(
        self, layer: int, x: Tensor, at: Tensor, modules: ModulesForward
    ) -> tuple[Tensor, Tensor]:
        a, prefix = self.attention, f"layers.{layer}.self_attn."
        plain, turned, rank = a.qk_nope_head_dim, a.qk_rope_head_dim, a.kv_lora_rank
        down = modules.linear(prefix + "kv_a_proj_with_mqa", x)
        latent, k_turned = torch.split(down, [rank, turned], dim=-1)
        latent = modules.norm(prefix + "kv_a_layernorm", latent)
        # One cache entry: vLLM 0.33 `concat_and_cache_mla`, SGLang 0.5.23 `MLATokenToKVPool`.
        entry = torch.cat((latent[:, None], self._rotated(k_turned[:, None], at)), dim=-1)
        entry, _ = modules.on_cache(layer, entry, entry[..., :0])
        latent, k_turned = torch.split(entry[:, 0], [rank, turned], dim=-1)
        up = self._heads(modules.kept_linear(prefix + "kv_b_proj", latent.contiguous()))
        k_plain, v = torch.split(up, [plain, a.v_head_dim], dim=-1)
        k_shared = k_turned[:, None].expand(-1, up.shape[1], -1, -1)
        return torch.cat((k_plain, k_shared), dim=-1), v

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.view(*flat.shape[:-1], self.num_heads, -1).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, self.rope, interleaved=self.attention.rope_interleave)


class LayersForward(ModulesForward):
    """A draft over decoder layers: x + attention(norm x), then + mlp(norm of that)."""

    def __init__(self, geometry: Any, weights: Mapping[str, Tensor], on_input: OnInput) -> None:
        super().__init__(geometry, weights, on_input)
        latent = isinstance(geometry.attention, LatentAttention)
        self.attention = MlaAttention(geometry) if latent else LlamaAttention(geometry)

    def layer(
        self,
        number: int,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        """One layer over a residual stream [B, T, W]; `normed` is the input of its attention."""
        prefix = f"layers.{number}."
        y = self.norm(f"{prefix}input_layernorm", x) if normed is None else normed
        r = x + self.attended(number, y, positions, attend)
        return r + self.mlp(number, self.norm(f"{prefix}post_attention_layernorm", r))

    def attended(self, number: int, y: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The output of the attention of a layer."""
        return self.attention.output(number, y, positions, attend, self)

    def mlp(self, number: int, z: Tensor) -> Tensor:
        """The part after the attention of a layer: a gated MLP."""
        return gated_mlp(f"layers.{number}.mlp.", z, self)


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
