"""EAGLE-3 with multi-head latent attention: the kind of kimi-k2.5-eagle3-mla.

TorchSpec writes `midlayer.*`, or `layers.0.*` for vLLM; ModelOpt writes `layers.0.*` without
embed_tokens and `draft_vocab_size`. The keys of a mixture of experts that ModelOpt's config keeps
from its template mean nothing: every engine builds one dense MLP.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ...config_reader import ConfigReader
from ...family import Dim
from ...rope import of_latent_attention
from ...shared.attention.names import Shapes, latent_shapes
from ...shared.eagle3.geometry import Eagle3MlaGeometry
from ...shared.eagle3.names import Eagle3, read_common

if TYPE_CHECKING:
    from ...shared.attention.forward import MlaAttention


class Eagle3Mla(Eagle3):
    """The EAGLE-3 MLA family with all its name variants.

    vLLM 0.33 knows both architectures and serves one class for them, SGLang 0.5.23 the first.
    """

    name = "eagle3-mla"
    architectures = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """A hidden_norm and the latent down-projection in layer 0."""
        return {
            "layers.0.self_attn.kv_a_proj_with_mqa.weight",
            "layers.0.hidden_norm.weight",
        } <= set(canonical_names)

    def read_geometry(self, config: Mapping[str, Any], where: object) -> Eagle3MlaGeometry:
        """See `Family.read_geometry`."""
        keys = ConfigReader(config, where)
        common = read_common(config, where, self.name)
        return Eagle3MlaGeometry(
            **common | {"rope": of_latent_attention(common["rope"], where)},
            q_lora_rank=keys.positive("q_lora_rank"),
            kv_lora_rank=keys.positive("kv_lora_rank"),
            qk_nope_head_dim=keys.positive("qk_nope_head_dim"),
            qk_rope_head_dim=keys.even("qk_rope_head_dim"),
            v_head_dim=keys.positive("v_head_dim"),
            rope_interleave=keys.flag("rope_interleave", True),
        )

    def attention_shapes(self, geometry: Eagle3MlaGeometry, width: Dim) -> Shapes:
        """See `Eagle3.attention_shapes`."""
        return latent_shapes(geometry, width)

    def attention(self, geometry: Eagle3MlaGeometry) -> "MlaAttention":
        """See `Eagle3.attention`."""
        from ...shared.attention.forward import MlaAttention

        return MlaAttention(geometry)


FAMILY = Eagle3Mla()
