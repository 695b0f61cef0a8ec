"""The MTP layer of GLM-4.5, 4.6 and 4.7: grouped-query attention, a mixture of experts.

vLLM 0.33 serves Glm4MoeForCausalLM as `Glm4MoeMTPModel` (`config/speculative.py:848`), SGLang
0.5.23 as Glm4MoeForCausalLMNextN. vLLM feeds back the layer's output before the last norm
(`glm4_moe_mtp.py:125`), SGLang behind it, and vLLM alone zeroes the embedding at position 0: replay
does as vLLM.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from ..config_reader import ConfigReader
from ..mixture import Shapes, read_mixture
from ..mtp import Mtp, grouped_attention_shapes, read_mtp
from ..mtp_geometry import MtpGroupedGeometry
from .deepseek_mtp import DeepseekMtp

if TYPE_CHECKING:
    from ..eagle3_forward import LlamaAttention


class Glm4MoeMtp(Mtp):
    """GLM's layer, named as DeepSeek's."""

    name = "glm4-moe-mtp"
    architectures = ("Glm4MoeForCausalLM", "Glm4MoeForCausalLMNextN", "Glm4MoeMTPModel")
    layer = re.compile(r"model\.layers\.\d+\.")
    outer = DeepseekMtp.outer
    state_first = False
    feeds_back_normed = False

    def read_geometry(self, config: Mapping[str, Any], where: object) -> MtpGroupedGeometry:
        """See `Family.read_geometry`."""
        keys = ConfigReader(config, where)
        part, rest = _rotated_part(keys)
        common = read_mtp(rest, where, self.name)
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

    def attention_shapes(self, geometry: MtpGroupedGeometry) -> Shapes:
        """See `Mtp.attention_shapes`."""
        return grouped_attention_shapes(geometry)

    def attention(self, geometry: MtpGroupedGeometry) -> "LlamaAttention":
        """See `Mtp.attention`."""
        from ..eagle3_forward import LlamaAttention

        return LlamaAttention(
            head_dim=geometry.head_dim,
            rope=geometry.rope,
            qk_norm=geometry.qk_norm,
            rotary_dim=geometry.rotary_dim,
        )


def _rotated_part(keys: ConfigReader) -> tuple[float, dict[str, Any]]:
    """The share of a head that is rotated, and config.json without it.

    Raises:
        CheckpointError: it is no number above 0 and up to 1.
    """
    key, spelled = "partial_rotary_factor", "rope_parameters"
    nested = keys.section(spelled)
    part = nested.number(key, keys.number(key, 0.5))
    if part > 1:
        raise CheckpointError(
            keys.where, f"{key}: expected at most 1, got {part:g}", fix=f"correct {key!r}"
        )
    rest = {name: value for name, value in keys.config.items() if name != key}
    if keys.config.get(spelled) is not None:
        rest[spelled] = {n: v for n, v in nested.config.items() if n != key}
    return part, rest


FAMILY = Glm4MoeMtp()
