"""MTP layers of Qwen3-Next and Qwen3.5 in engines."""

from collections.abc import Mapping
from dataclasses import replace

from ...architectures import declared_architecture
from ...engine_traits import Finding, MtpLayer, ServedDraft
from ...shared.mixture.names import is_expert
from ...shared.mtp.engine_traits import mtp_traits

_NEXT = "Qwen3NextForCausalLM"
_EXPERTS_WANTED = "engines serve layers of Qwen3-Next with experts alone"
_LAYER = "mtp.layers."
_OTHER_FORMAT = (
    "use another format: SGLang builds this layer in BF16 where ModelOpt's NVFP4 is declared"
)


def _is_dense(draft: ServedDraft) -> bool:
    """Whether it has an MLP, which only Qwen3.5's layers have in engines; executed."""
    own = declared_architecture(draft.config) == _NEXT
    return own and not any(is_expert(name) for name in draft.tensor_names)


def _in_vllm(draft: ServedDraft) -> Finding | None:
    if not _is_dense(draft):
        return None
    text = "RuntimeError: No Qwen3Next layer found in the model.layers."
    return Finding("init", text, _EXPERTS_WANTED)


def _in_sglang(draft: ServedDraft) -> Finding | None:
    if _is_dense(draft):
        if draft.config.get("num_experts"):
            unsure = "Loading a layer of Qwen3-Next without experts was never executed"
            return Finding("unknown", unsure, _EXPERTS_WANTED)
        told = f"ValueError: Tensor parallel size {draft.tp} is greater than the number of"
        return Finding("init", f"{told} experts 0.", _EXPERTS_WANTED)
    if _floats_in_sglang(draft) and any(n.endswith("weight_scale_2") for n in draft.tensor_names):
        return Finding(
            "load",
            "AssertionError: sglang/srt/layers/linear.py:894: assert param_data.shape =="
            " loaded_weight.shape",
            _OTHER_FORMAT,
        )
    return None


def _floats_in_vllm(draft: ServedDraft) -> Mapping[str, str]:
    """`qwen3_5_mtp.py:88` and `:110`: fc beside NVFP4; the layer where GPTQ's excludes name mtp."""
    if draft.signature.startswith("modelopt nvfp4"):
        return {"mtp.fc": "keep fc in BF16: vLLM builds it so where ModelOpt's NVFP4 is declared"}
    declared = draft.config.get("quantization_config")
    rules = declared.get("dynamic") if isinstance(declared, Mapping) else None
    named = any(rule.startswith("-:") and "mtp" in rule for rule in rules or ())
    if declared_architecture(draft.config) == _NEXT or not named:
        return {}
    return {
        _LAYER: "spell mtp as mt[p] in each key of dynamic that begins with -: and is not meant"
        " for the whole layer: vLLM builds the layer in BF16 where one of them says mtp"
    }


def _floats_in_sglang(draft: ServedDraft) -> Mapping[str, str]:
    """`qwen3_5_mtp.py:58`."""
    is_next = declared_architecture(draft.config) == _NEXT
    if is_next or not draft.signature.startswith("modelopt nvfp4"):
        return {}
    return {_LAYER: _OTHER_FORMAT}


_TRAITS = mtp_traits(
    frozenset({_NEXT, "Qwen3_5ForConditionalGeneration"}),
    vllm=MtpLayer(
        layer="model.layers.0.",
        prefix="mtp.layers.0.",
        no_parameter="ValueError: There is no module or parameter named '{name}' in"
        " Qwen3_5MultiTokenPredictor.",
        no_expert="AttributeError: Layer {experts}.experts has no parameter"
        " '{stacked}_{leaf}' for checkpoint weight '{name}'",
        misconfigured=_in_vllm,
        lists_parts=True,
        fc="mtp.fc",
        floats=_floats_in_vllm,
    ),
    sglang=MtpLayer(
        layer="model.layers.0.",
        prefix="mtp.layers.0.",  # `qwen3_5_mtp.py`
        prefixes={_NEXT: "model.layers.0."},  # `qwen3_next_mtp.py`
        attention="",
        most_modules=1,
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
        not_executed=frozenset(  # which it rewrites as well: `config/speculative.py:987`
            {"Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
        ),
    ),
)
