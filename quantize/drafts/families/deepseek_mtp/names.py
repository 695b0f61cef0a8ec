"""The MTP layer of DeepSeek-V3 (NextN): latent attention, a mixture of experts.

`model.layers.61` of the released folders; SGLang's export writes `model.layers.0` and
DeepseekV3ForCausalLMNextN. vLLM 0.33 serves deepseek_v3 as `DeepSeekMTPModel`
(`config/speculative.py:750`), and feeds back what the head reads (`deepseek_mtp.py:136`), as SGLang
0.5.23 does (`deepseek_nextn.py`); vLLM alone zeroes the embedding at position 0.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...config_reader import ConfigReader
from ...family import Dim
from ...rope import of_latent_attention
from ...shared.attention.names import Shapes, latent_shapes, read_latent, weight_names
from ...shared.mixture.names import read_mixture
from ...shared.mtp.geometry import MtpLatentGeometry
from ...shared.mtp.names import AROUND_DEEPSEEKS, Mtp, read_mtp
from .engine_traits import ENGINE_TRAITS

if TYPE_CHECKING:
    from ...shared.attention.forward import MlaAttention


class DeepseekMtp(Mtp):
    """DeepSeek-V3's layer, with a copy of the target's embedding and head."""

    name = "deepseek-mtp"
    engine_traits = ENGINE_TRAITS
    architectures = ("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN", "DeepSeekMTPModel")
    layer = re.compile(r"model\.layers\.(\d+)\.")
    outer = AROUND_DEEPSEEKS
    mark = "self_attn.kv_a_proj_with_mqa"
    state_first = False
    feeds_back_normed = True

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> MtpLatentGeometry:
        keys = ConfigReader(config, where)
        common = read_mtp(config, where, self.name, several=True)
        layers = keys.positive("num_hidden_layers")
        whole = config.get("architectures") != ["DeepseekV3ForCausalLMNextN"]
        dense = config.get("n_routed_experts") is None or (
            whole and layers < (config.get("first_k_dense_replace") or 0)
        )  # SGLang's export counts one layer, which is always a mixture: `deepseek_v2.py`, is_nextn
        return MtpLatentGeometry(
            **common | {"rope": of_latent_attention(common["rope"], where)},
            mixture=None if dense else read_mixture(keys),
            **read_latent(keys),
        )

    @override
    def attention_shapes(self, geometry: MtpLatentGeometry) -> Shapes:
        return weight_names(latent_shapes(geometry, Dim(geometry.hidden_size, "hidden_size")))

    @override
    def attention(self, geometry: MtpLatentGeometry) -> "MlaAttention":
        from ...shared.attention.forward import MlaAttention

        return MlaAttention(geometry)


FAMILY = DeepseekMtp()
