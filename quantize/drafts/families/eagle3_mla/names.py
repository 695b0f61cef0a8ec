"""EAGLE-3 with multi-head latent attention: the kind of kimi-k2.5-eagle3-mla.

TorchSpec writes `midlayer.*`, or `layers.0.*` for vLLM; ModelOpt writes `layers.0.*` without
embed_tokens and `draft_vocab_size`. The keys of a mixture of experts that ModelOpt's config keeps
from its template mean nothing: every engine builds one dense MLP.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...config_reader import ConfigReader
from ...family import Dim
from ...rope import of_latent_attention
from ...shared.attention.names import Shapes, latent_shapes, read_latent
from ...shared.eagle3.geometry import Eagle3MlaGeometry
from ...shared.eagle3.names import Eagle3, read_common
from .engine_traits import ENGINE_TRAITS

if TYPE_CHECKING:
    from ...shared.attention.forward import MlaAttention


class Eagle3Mla(Eagle3):
    """The EAGLE-3 MLA family with all its name variants.

    vLLM 0.33 knows both architectures and serves one class for them, SGLang 0.5.23 the first.
    """

    name = "eagle3-mla"
    engine_traits = ENGINE_TRAITS
    architectures = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
    own_marks = (r"kv_[ab]_proj",)

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """A hidden_norm and the latent down-projection in layer 0."""
        return {
            "layers.0.self_attn.kv_a_proj_with_mqa.weight",
            "layers.0.hidden_norm.weight",
        } <= set(canonical_names)

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> Eagle3MlaGeometry:
        keys = ConfigReader(config, where)
        common = read_common(config, where, self.name)
        return Eagle3MlaGeometry(
            **common | {"rope": of_latent_attention(common["rope"], where)},
            **read_latent(keys),
        )

    @override
    def attention_shapes(self, geometry: Eagle3MlaGeometry, width: Dim) -> Shapes:
        return latent_shapes(geometry, width)

    @override
    def attention(self, geometry: Eagle3MlaGeometry) -> "MlaAttention":
        from ...shared.attention.forward import MlaAttention

        return MlaAttention(geometry)


FAMILY = Eagle3Mla()
