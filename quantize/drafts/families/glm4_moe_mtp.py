"""The MTP layer of GLM-4.5, 4.6 and 4.7: grouped-query attention, a mixture of experts.

vLLM 0.33 serves Glm4MoeForCausalLM as `Glm4MoeMTPModel` (`config/speculative.py:848`), SGLang
0.5.23 as Glm4MoeForCausalLMNextN. vLLM feeds back the layer's output before the last norm
(`glm4_moe_mtp.py:125`), SGLang its output after that; only vLLM zeroes the embedding at position 0.
Replay does as vLLM.
"""

import re

from typing_extensions import override

from ..config_reader import ConfigReader
from ..engine_traits import Finding, MtpLayer, ServedDraft
from ..shared import mtp
from ..shared.layers import read_heads
from ..shared.mixture import read_mixture


def _in_vllm(draft: ServedDraft) -> Finding | None:
    """A layer before `first_k_dense_replace` has no experts: `glm4_moe.py`."""
    number, first = draft.config.get("num_hidden_layers"), draft.config.get("first_k_dense_replace")
    is_dense = isinstance(number, int) and isinstance(first, int) and number < first
    if not is_dense:
        return None
    return Finding(
        "init",
        "RuntimeError: No Glm4MoE layer found in model.layers.",
        "correct first_k_dense_replace in config.json: engines serve GLM's MTP layers with experts"
        " alone",
    )


ENGINE_TRAITS = mtp.mtp_traits(
    frozenset({"Glm4MoeForCausalLM"}),
    vllm=MtpLayer(
        layer="model.layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
        lists_parts=True,
        misconfigured=_in_vllm,
        head="model.layers.{n}.head",  # `glm4_moe_mtp.py:73`
    ),
    sglang=MtpLayer(
        layer="model.decoder.",
        prefix="model.decoder.",
        floats=mtp.floats_beside_nvfp4("model.decoder."),
    ),
    more_in_sglang=frozenset({"Glm4MoeForCausalLMNextN"}),
)


class Glm4MoeMtp(mtp.Mtp):
    """GLM's layer, with DeepSeek's names."""

    name = "glm4-moe-mtp"
    engine_traits = ENGINE_TRAITS
    architectures = ("Glm4MoeForCausalLM", "Glm4MoeForCausalLMNextN", "Glm4MoeMTPModel")
    layer = re.compile(r"model\.layers\.(\d+)\.")
    outer = mtp.AROUND_DEEPSEEKS
    state_first = False
    feeds_back_normed = False

    @override
    def geometry(self, keys: ConfigReader) -> mtp.MtpGeometry:
        common = mtp.read_mtp(keys, self.name, several=True, part=0.5)
        return mtp.MtpGeometry(
            **common,
            attention=read_heads(
                keys,
                common,
                input_bias=keys.flag("attention_bias", False),
                qk_norm=keys.flag("use_qk_norm", False),
            ),
            mixture=read_mixture(keys),
        )


FAMILY = Glm4MoeMtp()
