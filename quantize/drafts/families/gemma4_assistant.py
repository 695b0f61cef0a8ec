"""Gemma 4's assistant: a chain whose layers read keys and values of the target, and have none.

Sources: `gemma4_mtp.py` and `v1/spec_decode/gemma4.py` of vLLM 0.33.0, `gemma4_mtp.py` of SGLang
0.5.23. Layers of a type read the cache of the target's last layer of that type, so what a draft
computes needs those two layers' keys and values at all positions, besides the last hidden state
(`experiments/families.md`). The embedding that it stores is its head's, of its own width: tokens
are embedded by the target. Its classes were executed as drafts without a family are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ..config_reader import ConfigReader, with_text_config
from ..engine_traits import EngineTraits, InSglang, InVllm
from ..family import Dim, Family, TensorSpec
from ..geometry import Geometry, last_state
from ..shared.layers import dims, mlp_shapes

_SLIDING, _FULL = "sliding_attention", "full_attention"
_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantGeometry(Geometry):
    """Config of an assistant.

    Attributes:
        head_dims: by layer, the width of a head.
        shared: elements of a token's keys, together those of the target's layers that are read.
        centroids: groups of tokens by which vLLM computes a part of the logits; 0 = none.
    """

    head_dims: tuple[int, ...]
    shared: int
    centroids: int

    @property
    def bytes_of_token(self) -> int:
        """Of a trace in BF16: the hidden state, keys and values of a layer of each type."""
        return _BYTES * (self.target_hidden_size + 2 * self.shared)


class Gemma4Assistant(Family):
    """The assistants of Gemma 4."""

    name = "gemma4-assistant"
    engine_traits = EngineTraits(
        vllm=InVllm(roots={"model.": None}, fc="model.pre_projection"),
        sglang=InSglang(roots={"model.": None}),
    )
    architectures = (
        "Gemma4AssistantForCausalLM",
        "Gemma4UnifiedAssistantForCausalLM",
        "Gemma4MTPModel",  # as vLLM calls both
    )
    prefixes = (("model.", ""),)
    served_unquantized = ("embed_tokens", "lm_head", "pre_projection", "post_projection")
    makes_features = ("pre_projection.",)
    linears_per_layer = 5
    shared_tables = ()
    marks = frozenset({"pre_projection.weight", "post_projection.weight"})
    own_marks = ("pre_feedforward_layernorm",)
    no_cache_scales = "its layers read the target's cache, with the target's scales"

    @override
    def no_maths(self, geometry: Any) -> str:
        return (
            "its layers read keys and values of two layers of the target, which traces do not hold:"
            f" {geometry.bytes_of_token:,} bytes a token with the hidden state, in BF16"
        )

    @override
    def geometry(self, keys: ConfigReader) -> AssistantGeometry:
        inner = ConfigReader(with_text_config(keys.config), keys.where)
        sizes = {k: inner.positive(k) for k in ("hidden_size", "num_attention_heads", "vocab_size")}
        number, heads = inner.positive("num_hidden_layers"), inner.positive("num_key_value_heads")
        types: Any = inner.config.get("layer_types")
        known = isinstance(types, list) and len(types) == number
        if not known or any(kind not in (_SLIDING, _FULL) for kind in types):
            raise inner.wrong("layer_types", f"{number} of {_SLIDING} and {_FULL}", types)
        width = {_SLIDING: inner.positive("head_dim")}
        width[_FULL] = inner.positive("global_head_dim", 512)
        fewer = inner.flag("attention_k_eq_v", False)
        cached = {_SLIDING: heads, _FULL: heads}
        if fewer:
            cached[_FULL] = inner.positive("num_global_key_value_heads", heads)
        common = last_state(
            {
                **sizes,
                "num_layers": number,
                "intermediate_size": inner.positive("intermediate_size"),
                "rms_norm_eps": inner.number("rms_norm_eps", 1e-6),
                "rope": None,
            }
        )
        common["target_hidden_size"] = inner.positive("backbone_hidden_size", 1536)
        ordered = inner.flag("use_ordered_embeddings", False)
        return AssistantGeometry(
            **common,
            head_dims=tuple(width[kind] for kind in types),
            shared=sum(cached[kind] * width[kind] for kind in set(types)),
            centroids=inner.positive("num_centroids", 2048) if ordered else 0,
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: AssistantGeometry = geometry
        hidden, inner, vocab = dims(g, "hidden_size", "intermediate_size", "vocab_size")
        wide = Dim(g.target_hidden_size, "backbone_hidden_size")
        both = Dim(2 * wide.size, "2 x backbone_hidden_size")
        table = {
            "embed_tokens.weight": TensorSpec(role="embedding", shape=(vocab, hidden)),
            "lm_head.weight": TensorSpec(role="head", shape=(vocab, hidden), optional=True),
            "norm.weight": TensorSpec(role="norm", shape=(hidden,)),
            "pre_projection.weight": TensorSpec(role="fusion", shape=(hidden, both)),
            "post_projection.weight": TensorSpec(role="fusion", shape=(wide, hidden)),
        }
        if g.centroids:
            groups = (Dim(g.centroids, "num_centroids"), hidden)
            table |= {
                "masked_embedding.centroids.weight": TensorSpec(role="proposal", shape=groups),
                "masked_embedding.token_ordering": TensorSpec(
                    role="vocabulary_map", shape=(vocab,), dtypes=("I64", "I32")
                ),
            }
        for i, head in enumerate(g.head_dims):
            at, keys = f"layers.{i}.", "num_attention_heads x head_dim or global_head_dim"
            queries = Dim(g.num_attention_heads * head, keys)
            shapes: Mapping[str, Any] = {
                **mlp_shapes("mlp.", inner, hidden),
                "self_attn.q_proj.weight": ("attention", (queries, hidden)),
                "self_attn.o_proj.weight": ("attention", (hidden, queries)),
                "self_attn.q_norm.weight": ("norm", (Dim(head, "head_dim or global_head_dim"),)),
                **{f"{norm}.weight": ("norm", (hidden,)) for norm in _NORMS},
                "layer_scalar": ("other", (Dim(1, "one number"),)),
            }
            for name, (role, shape) in shapes.items():
                table[f"{at}{name}"] = TensorSpec(role=role, shape=shape)
        return table


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
FAMILY = Gemma4Assistant()
