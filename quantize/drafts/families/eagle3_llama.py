"""EAGLE-3 with Llama layers: `LlamaForCausalLMEagle3`, the kind of kimi-k2.5-eagle3."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config_reader import ConfigReader
from ..eagle3 import Eagle3, Eagle3Geometry, Shapes, read_common
from ..family import Dim

if TYPE_CHECKING:
    from ..eagle3_forward import LlamaAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3LlamaGeometry(Eagle3Geometry):
    """Config of an EAGLE-3 Llama draft; widths in elements."""

    num_key_value_heads: int
    head_dim: int


class Eagle3Llama(Eagle3):
    """The EAGLE-3 Llama family with all its name variants."""

    name = "eagle3-llama"
    architectures = ("LlamaForCausalLMEagle3",)
    fused_linears = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """Fc over features and plain q_proj; DFlash has its hidden_norm outside the layers."""
        return {
            "fc.weight",
            "layers.0.self_attn.q_proj.weight",
            "layers.0.hidden_norm.weight",
        } <= set(canonical_names)

    def read_geometry(self, config: Mapping[str, Any], where: object) -> Eagle3LlamaGeometry:
        """See `Family.read_geometry`."""
        keys = ConfigReader(config, where)
        common = read_common(config, where, self.name)
        heads = common["num_attention_heads"]
        return Eagle3LlamaGeometry(
            **common,
            num_key_value_heads=keys.positive("num_key_value_heads", heads),
            head_dim=keys.positive("head_dim", common["hidden_size"] // heads),
        )

    def attention_shapes(self, geometry: Eagle3LlamaGeometry, width: Dim) -> Shapes:
        """See `Eagle3.attention_shapes`."""
        g = geometry
        hidden = Dim(g.hidden_size, "hidden_size")
        queries = Dim(g.num_attention_heads * g.head_dim, "num_attention_heads x head_dim")
        keys = Dim(g.num_key_value_heads * g.head_dim, "num_key_value_heads x head_dim")
        return {
            "self_attn.q_proj": ("attention", (queries, width)),
            "self_attn.k_proj": ("attention", (keys, width)),
            "self_attn.v_proj": ("attention", (keys, width)),
            "self_attn.o_proj": ("attention", (hidden, queries)),
        }

    def attention(self, geometry: Eagle3LlamaGeometry) -> "LlamaAttention":
        """See `Eagle3.attention`."""
        from ..eagle3_forward import LlamaAttention

        return LlamaAttention(head_dim=geometry.head_dim, rope=geometry.rope)


FAMILY = Eagle3Llama()
