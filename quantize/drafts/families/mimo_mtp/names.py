"""The MTP layer of MiMo: a dense Qwen2 layer, `model.mtp_layers.0` of MiMo-7B.

vLLM 0.33 serves MiMoForCausalLM as `MiMoMTPModel` (`config/speculative.py:795`), SGLang 0.5.23 as
`MiMoMTP`; both zero the embedding at position 0, put the state first and feed back what the head
reads (`mimo_mtp.py:78`).
"""

import re
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from .....recipes.errors import CheckpointError
from ...config_reader import ConfigReader
from ...shared.mtp.geometry import MtpGroupedGeometry
from ...shared.mtp.names import GroupedMtp, read_mtp
from .engine_traits import ENGINE_TRAITS


class MimoMtp(GroupedMtp):
    """MiMo's layer; embedding and head are the target's."""

    name = "mimo-mtp"
    engine_traits = ENGINE_TRAITS
    architectures = ("MiMoForCausalLM", "MiMoMTPModel", "MiMoMTP")
    layer = re.compile(r"model\.mtp_layers\.\d+\.")
    outer = {  # noqa: RUF012 - a constant of the class
        "input_proj": "fc",
        "token_layernorm": "embedding_norm",
        "hidden_layernorm": "state_norm",
        "final_layernorm": "norm",
    }
    state_first = True
    feeds_back_normed = True

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> MtpGroupedGeometry:
        keys = ConfigReader(config, where)
        if keys.flag("use_sliding_window", False):
            raise CheckpointError(
                where,
                "use_sliding_window: expected false, got true",
                fix=f"a draft of {self.name} with a sliding window cannot be replayed",
            )
        common = read_mtp(config, where, self.name)
        heads = common["num_attention_heads"]
        head_dim = keys.positive("head_dim", common["hidden_size"] // heads)
        return MtpGroupedGeometry(
            **common,
            num_key_value_heads=keys.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            qkv_bias=True,  # whatever attention_bias says: `qwen2.py` builds it so
            qk_norm=False,
            rotary_dim=head_dim,
        )


FAMILY = MimoMtp()
