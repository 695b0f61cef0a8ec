"""MTP layers of Qwen3-Next and Qwen3.5 in engines."""

from dataclasses import replace

from ...architectures import declared_architecture
from ...engine_traits import Finding, MtpLayer, ServedDraft
from ...shared.mixture.names import is_expert
from ...shared.mtp.engine_traits import mtp_traits

_NEXT = "Qwen3NextForCausalLM"
_EXPERTS_WANTED = "engines serve layers of Qwen3-Next with experts alone"


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
    name = declared_architecture(draft.config)
    if name != _NEXT and draft.signature.startswith("modelopt nvfp4"):
        return Finding(  # whatever is excluded: `qwen3_5_mtp.py:58`, and executed
            "load",
            "AssertionError: sglang/srt/layers/linear.py:894: assert param_data.shape =="
            " loaded_weight.shape",
            "use another format: SGLang builds this layer in BF16 where ModelOpt's NVFP4 is"
            " declared",
        )
    return None


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
    ),
    sglang=MtpLayer(
        layer="model.layers.0.",
        prefix="mtp.layers.0.",  # `qwen3_5_mtp.py`
        prefixes={_NEXT: "model.layers.0."},  # `qwen3_next_mtp.py`
        attention="",
        most_modules=1,
        misconfigured=_in_sglang,
    ),
)
ENGINE_TRAITS = replace(
    _TRAITS,
    shared_experts="shared_expert",
    vllm=replace(
        _TRAITS.vllm,
        not_executed=frozenset(  # which it rewrites as well: `config/speculative.py:987`
            {"Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
        ),
    ),
)
