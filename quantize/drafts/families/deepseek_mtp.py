"""The MTP layer of DeepSeek-V3 (NextN): MLA, a mixture of experts; V3.2 and GLM-5 add an indexer.

`model.layers.61` of the released folders; SGLang's export writes `model.layers.0` and
DeepseekV3ForCausalLMNextN. vLLM 0.33 serves deepseek_v3 as `DeepSeekMTPModel`
(`config/speculative.py:750`), and feeds back what the head reads (`deepseek_mtp.py:136`), as SGLang
0.5.23 does (`deepseek_nextn.py`); only vLLM zeroes the embedding at position 0.
"""

import re

from typing_extensions import override

from ..architectures import declared_architecture
from ..config_reader import ConfigReader
from ..engine_traits import Finding, MtpLayer, ServedDraft
from ..geometry import Indexer
from ..shared.layers import with_latent
from ..shared.mixture import read_mixture
from ..shared.mtp import (
    AROUND_DEEPSEEKS,
    Mtp,
    MtpGeometry,
    floats_beside_nvfp4,
    mtp_traits,
    read_mtp,
)


def _in_vllm(draft: ServedDraft) -> Finding | None:
    number = draft.config.get("num_hidden_layers", 0)
    names = draft.tensor_names
    if not any(name.startswith(f"model.layers.{number}.") for name in names):
        # `deepseek_mtp.py:505`
        return Finding(
            "load",
            f"ValueError: MTP speculative decoding layer {number} weights missing from checkpoint.",
            f"name the tensors model.layers.{number}, or serve SGLang's export with SGLang",
        )
    corrected = any(name.endswith("e_score_correction_bias") for name in names)
    if corrected and "topk_method" not in draft.config:
        return Finding(
            "load",
            f"KeyError: 'model.layers.{number}.mtp_block.mlp.gate.e_score_correction_bias'",
            "add topk_method: noaux_tc to config.json",
        )
    return None


ENGINE_TRAITS = mtp_traits(
    frozenset({"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}),
    vllm=MtpLayer(
        layer="model.layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
        misconfigured=_in_vllm,
        lists_parts=True,
    ),
    sglang=MtpLayer(
        layer="model.decoder.",
        prefix="model.decoder.",
        floats=floats_beside_nvfp4("model.decoder."),
    ),
    more_in_sglang=frozenset({"DeepseekV3ForCausalLMNextN", "GlmMoeDsaForCausalLMNextN"}),
    latent=True,
)


class DeepseekMtp(Mtp):
    """DeepSeek-V3's layer, with a copy of the target's embedding and head."""

    name = "deepseek-mtp"
    engine_traits = ENGINE_TRAITS
    architectures = (
        "DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN", "DeepSeekMTPModel",
        "DeepseekV32ForCausalLM", "DeepseekV32MTPModel",
        "GlmMoeDsaForCausalLM", "GlmMoeDsaForCausalLMNextN",
    )  # fmt: skip
    layer = re.compile(r"model\.layers\.(\d+)\.")
    outer = AROUND_DEEPSEEKS
    mark = "self_attn.kv_a_proj_with_mqa"
    state_first = False
    feeds_back_normed = True

    @override
    def geometry(self, keys: ConfigReader) -> MtpGeometry:
        common = read_mtp(keys, self.name, several=True)
        layers, config = keys.positive("num_hidden_layers"), keys.config
        whole = declared_architecture(config) != "DeepseekV3ForCausalLMNextN"
        given = config.get("first_k_dense_replace")
        dense = config.get("n_routed_experts") is None or (
            whole and bool(given) and layers < keys.positive("first_k_dense_replace")
        )  # SGLang's export counts one layer, which is always a mixture: `deepseek_v2.py`, is_nextn
        mixture = None if dense else read_mixture(keys)
        return MtpGeometry(**with_latent(keys, common, _indexer(keys)), mixture=mixture)


def _indexer(keys: ConfigReader) -> Indexer | None:
    """Engines build one wherever the key is: `is_deepseek_dsa`, `deepseek_v2.py`."""
    if keys.config.get("index_topk") is None:
        return None
    return Indexer(
        num_heads=keys.positive("index_n_heads"),
        head_dim=keys.positive("index_head_dim"),
        most=keys.positive("index_topk"),
        chooses_once=keys.flag("index_share_for_mtp_iteration", False),
    )


FAMILY = DeepseekMtp()
