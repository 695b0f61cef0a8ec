"""EAGLE-3 with Llama layers: `LlamaForCausalLMEagle3`, the kind of kimi-k2.5-eagle3.

vLLM's `Eagle3Qwen3ForCausalLM` is the same with normed queries and keys.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from ..config_reader import ConfigReader
from ..eagle3 import Eagle3, Shapes, read_common
from ..eagle3_geometry import Eagle3LlamaGeometry
from ..family import Dim

if TYPE_CHECKING:
    from ..eagle3_forward import LlamaAttention


class Eagle3Llama(Eagle3):
    """The EAGLE-3 Llama family with all its name variants."""

    name = "eagle3-llama"
    architectures = ("LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM")

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """A hidden_norm in layer 0 and plain q_proj; DFlash has that norm outside the layers."""
        return {
            "layers.0.self_attn.q_proj.weight",
            "layers.0.hidden_norm.weight",
        } <= set(canonical_names)

    def read_geometry(self, config: Mapping[str, Any], where: object) -> Eagle3LlamaGeometry:
        """See `Family.read_geometry`."""
        keys = ConfigReader(config, where)
        types = config.get("layer_types") or []
        if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
            raise CheckpointError(
                where,
                f"layer_types: expected 'full_attention' for every layer, got {types!r}",
                fix=f"a draft of {self.name} with another attention cannot be replayed",
            )
        common = read_common(config, where, self.name)
        heads = common["num_attention_heads"]
        return Eagle3LlamaGeometry(
            **common,
            num_key_value_heads=keys.positive("num_key_value_heads", heads),
            head_dim=keys.positive("head_dim", common["hidden_size"] // heads),
            qk_norm=config.get("architectures") == ["Eagle3Qwen3ForCausalLM"],
        )

    def attention_shapes(self, geometry: Eagle3LlamaGeometry, width: Dim) -> Shapes:
        """See `Eagle3.attention_shapes`."""
        g = geometry
        hidden = Dim(g.hidden_size, "hidden_size")
        queries = Dim(g.num_attention_heads * g.head_dim, "num_attention_heads x head_dim")
        keys = Dim(g.num_key_value_heads * g.head_dim, "num_key_value_heads x head_dim")
        shapes: Shapes = {
            "self_attn.q_proj": ("attention", (queries, width)),
            "self_attn.k_proj": ("attention", (keys, width)),
            "self_attn.v_proj": ("attention", (keys, width)),
            "self_attn.o_proj": ("attention", (hidden, queries)),
        }
        if g.qk_norm:
            head = Dim(g.head_dim, "head_dim")
            shapes |= {"self_attn.q_norm": ("norm", (head,)), "self_attn.k_norm": ("norm", (head,))}
        return shapes

    def attention(self, geometry: Eagle3LlamaGeometry) -> "LlamaAttention":
        """See `Eagle3.attention`."""
        from ..eagle3_forward import LlamaAttention

        g = geometry
        return LlamaAttention(head_dim=g.head_dim, rope=g.rope, qk_norm=g.qk_norm)


FAMILY = Eagle3Llama()
