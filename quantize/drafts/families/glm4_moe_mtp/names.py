"""The MTP layer of GLM-4.5, 4.6 and 4.7: grouped-query attention, a mixture of experts.

vLLM 0.33 serves Glm4MoeForCausalLM as `Glm4MoeMTPModel` (`config/speculative.py:848`), SGLang
0.5.23 as Glm4MoeForCausalLMNextN. vLLM feeds back the layer's output before the last norm
(`glm4_moe_mtp.py:125`), SGLang behind it, and vLLM alone zeroes the embedding at position 0: replay
does as vLLM.
"""

import re
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ...config_reader import ConfigReader
from ...shared.mixture.names import read_mixture
from ...shared.mtp.geometry import MtpGroupedGeometry
from ...shared.mtp.names import AROUND_DEEPSEEKS, GroupedMtp, read_mtp, rotated_part
from .engine_traits import ENGINE_TRAITS


class Glm4MoeMtp(GroupedMtp):
    """GLM's layer, named as DeepSeek's."""

    name = "glm4-moe-mtp"
    engine_traits = ENGINE_TRAITS
    architectures = ("Glm4MoeForCausalLM", "Glm4MoeForCausalLMNextN", "Glm4MoeMTPModel")
    layer = re.compile(r"model\.layers\.(\d+)\.")
    outer = AROUND_DEEPSEEKS
    state_first = False
    feeds_back_normed = False

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> MtpGroupedGeometry:
        keys = ConfigReader(config, where)
        part, rest = rotated_part(keys, 0.5)
        common = read_mtp(rest, where, self.name, several=True)
        heads = common["num_attention_heads"]
        head_dim = keys.positive("head_dim", common["hidden_size"] // heads)
        return MtpGroupedGeometry(
            **common,
            mixture=read_mixture(keys),
            num_key_value_heads=keys.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            qkv_bias=keys.flag("attention_bias", False),
            qk_norm=keys.flag("use_qk_norm", False),
            rotary_dim=int(head_dim * part),
        )


FAMILY = Glm4MoeMtp()
