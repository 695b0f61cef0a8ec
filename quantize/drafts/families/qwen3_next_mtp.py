"""The MTP layer of Qwen3-Next and Qwen3.5: attention with an output gate, an MLP or a mixture.

Stored under `mtp.` in the released folders. vLLM 0.33 serves it as `Qwen3NextMTP`, `Qwen3_5MTP` and
`Qwen3_5MoeMTP` (`config/speculative.py:908`, `:987`), SGLang 0.5.23 as `Qwen3NextForCausalLMMTP`
and `Qwen3_5ForCausalLMMTP` (`model_config.py:1134`, `:1159`). Neither zeroes the embedding at
position 0, and both feed back what the head reads (`qwen3_5_mtp.py:203`). Norms multiply by
1 + weight (`GemmaRMSNorm`).

Qwen3.5 keeps the sizes in text_config. For text its three rotary positions are equal, so one
angle turns them.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from typing_extensions import override

from ....recipes.errors import CheckpointError, short
from ..architectures import declared_architecture
from ..config_reader import ConfigReader, Served, object_at
from ..engine_traits import Finding, MtpLayer, ServedDraft
from ..family import SpeculatorsForm
from ..shared import mtp
from ..shared.layers import read_heads
from ..shared.mixture import is_expert, read_qwen_mixture

_NEXT = "Qwen3NextForCausalLM"
_LAYER = "mtp.layers."


def _is_dense(draft: ServedDraft) -> bool:
    """Whether it has an MLP, which only Qwen3.5's layers have in engines; executed."""
    is_next = declared_architecture(draft.config) == _NEXT
    return is_next and not any(is_expert(name) for name in draft.tensor_names)


def _in_sglang(draft: ServedDraft) -> Finding | None:
    if draft.checkpoint.stacks_experts and declared_architecture(draft.config) == _NEXT:
        return Finding(
            "load",
            "KeyError: 'model.layers.0.mlp.experts.down_proj'",
            "store each expert by itself, as the released folders of Qwen3-Next do",
        )
    if _is_dense(draft):
        if draft.config.get("num_experts"):
            return Finding(
                "unknown",
                "Loading a layer of Qwen3-Next without experts was never executed",
                "engines serve layers of Qwen3-Next with experts alone",
            )
        return Finding(
            "init",
            f"ValueError: Tensor parallel size {draft.tp} is greater than the number of experts 0.",
            "engines serve layers of Qwen3-Next with experts alone",
        )
    return None


def _floats_in_vllm(draft: ServedDraft) -> Mapping[str, str]:
    """`qwen3_5_mtp.py:88`: fc beside NVFP4."""
    if draft.is_nvfp4_of_modelopt:
        return {"mtp.fc": "keep fc in BF16: vLLM builds it so where ModelOpt's NVFP4 is declared"}
    return {}


def _floats_in_sglang(draft: ServedDraft) -> Mapping[str, str]:
    """`_mtp_quant_config` of `qwen3_5_mtp.py:40`."""
    declared = object_at(draft.config, "quantization_config")
    named = [name for name in declared.get("exclude") or () if str(name).startswith("mtp.")]
    if declared_architecture(draft.config) == _NEXT:
        return {}
    if draft.method == "quark" and any("mlp.experts" in name for name in named):
        return {_LAYER: "exclude none of its experts: SGLang then builds the whole layer in BF16"}
    return mtp.floats_beside_nvfp4(_LAYER)(draft)


_TRAITS = mtp.mtp_traits(
    frozenset({_NEXT, "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}),
    vllm=MtpLayer(
        layer="model.layers.0.",
        prefix="mtp.layers.0.",
        misconfigured=lambda draft: (
            Finding(
                "init",
                "RuntimeError: No Qwen3Next layer found in the model.layers.",
                "engines serve layers of Qwen3-Next with experts alone",
            )
            if _is_dense(draft)
            else None
        ),
        lists_parts=True,
        fc="mtp.fc",
        floats=_floats_in_vllm,
    ),
    sglang=MtpLayer(
        layer="model.layers.0.",
        prefix="mtp.layers.0.",  # `qwen3_5_mtp.py`
        prefixes={_NEXT: "model.layers.0."},  # `qwen3_next_mtp.py`
        attention="",
        misconfigured=_in_sglang,
        lists_parts=True,
        floats=_floats_in_sglang,
    ),
)
ENGINE_TRAITS = replace(
    _TRAITS,
    shared_experts="shared_expert",
    own_types={"qwen3_5_mtp": "set model_type to qwen3_5, its target's"},  # mlx-vlm's
    vllm=replace(
        _TRAITS.vllm,
        # which it rewrites as well: `config/speculative.py:987`
        not_executed=frozenset({"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}),
    ),
)


_MTP_LAYERS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Those that the package trains and an engine has: `qwen3` has no gate."""


def _spelled(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """Source: `convert/mtp/converter.py`, whose names `Qwen3NextMtp` knows."""
    count = keys.positive("num_nextn_predict_layers", 1)
    if count != 1:
        raise CheckpointError(
            keys.where,
            f"num_nextn_predict_layers: expected 1, got {count}: the package trains one layer",
            fix="correct 'num_nextn_predict_layers'",
        )
    model_type, known = layers.config.get("model_type"), " or ".join(map(repr, _MTP_LAYERS))
    fits = model_type in _MTP_LAYERS
    if not fits:
        raise CheckpointError(
            layers.where,
            f"model_type: expected {known}, got {short(model_type)}",
            fix="no engine has an MTP layer of another kind in this layout",
        )
    return {"architectures": ["Qwen3NextMTP"], "mtp_num_hidden_layers": count}


_SERVED: Served = {
    "mtp_num_hidden_layers": (1, "several layers"),
    "attn_output_gate": (True, "attention without a gate, as where SpecForge names no key"),
    "attention_bias": (False, "biases, of which engines know nothing"),
    "qkv_bias": (False, "biases, of which engines know nothing"),
    "mtp_use_dedicated_embeddings": (False, "an embedding of its own"),
}
_SPECFORGE = "Qwen3_5MTPDraftModel"
"""The type that SpecForge trains it as; at 0958d4d its layers had no gate and other norms."""
_MULTIMODAL = "model.language_model.embed_tokens."


class Qwen3NextMtp(mtp.Mtp):
    """Qwen's layer; embedding and head are the target's."""

    name = "qwen3-next-mtp"
    engine_traits = ENGINE_TRAITS
    speculators = {  # noqa: RUF012 - a constant of the class
        "mtp": SpeculatorsForm(("MTPDraftModel", "MTPDraftModel"), _spelled)
    }
    architectures = (
        "Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
        "Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP", "Qwen3NextForCausalLMMTP",
        "Qwen3_5ForCausalLMMTP", _SPECFORGE,
    )  # fmt: skip
    layer = re.compile(r"mtp\.|mtp_layers\.0\.")
    outer = {  # noqa: RUF012 - a constant of the class
        "fc": "fc",
        "pre_fc_norm_embedding": "embedding_norm",
        "pre_fc_norm_hidden": "state_norm",
        "norm": "norm",
        "lm_head": "lm_head",  # as SpecForge saves it
        "layers.0": "layers.0",  # the layer itself, beside them
        "input_proj": "fc",  # below mtp_layers.0, as speculators saves it
        "token_layernorm": "embedding_norm",
        "hidden_layernorm": "state_norm",
        "final_layernorm": "norm",
    }
    relatives = {  # noqa: RUF012 - a constant of the class
        "mlp.experts.gate_up_proj": "a mixture whose experts are stacked in one tensor"
    }
    state_first = False
    masks_first = False
    feeds_back_normed = True
    zero_centred = True

    @override
    def canonical_name(self, name: str) -> str:
        if name.startswith(_MULTIMODAL):
            return name.removeprefix("model.language_model.")
        return super().canonical_name(name)

    @override
    def geometry(self, keys: ConfigReader) -> mtp.MtpGeometry:
        trained = keys.config.get("architectures") == [_SPECFORGE]
        if keys.config.get("text_config") is not None:
            keys = keys.section("text_config")
        without_gate = trained and keys.config.get("attn_output_gate") is None
        named = {**keys.config, "attn_output_gate": False} if without_gate else keys.config
        ConfigReader(named, keys.where).refuse_others(_SERVED)
        mixture = read_qwen_mixture(keys) if _has_experts(keys) else None
        if mixture is not None:
            usual = {"intermediate_size": mixture.width}  # of no module
            keys = ConfigReader({**usual, **keys.config}, keys.where)
        common = mtp.read_mtp(keys, self.name, part=1.0 if trained else 0.25)
        return mtp.MtpGeometry(
            **common,
            attention=read_heads(keys, common, qk_norm=True, gate="elements"),
            mixture=mixture,
        )


def _has_experts(keys: ConfigReader) -> bool:
    """As vLLM decides for a layer numbered 0: `qwen3_next.py`, `Qwen3NextDecoderLayer`."""
    config, only = keys.config, keys.config.get("mlp_only_layers")
    dense = isinstance(only, list) and 0 in only
    return (
        bool(config.get("num_experts")) and config.get("decoder_sparse_step", 1) == 1 and not dense
    )


FAMILY = Qwen3NextMtp()
