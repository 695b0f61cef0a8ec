"""DeepSeek-V3's MTP layer in engines."""

from dataclasses import replace

from ...engine_traits import Finding, MtpLayer, ServedDraft
from ...shared.mtp.engine_traits import NO_PARAMETER, mtp_traits


def _in_vllm(draft: ServedDraft) -> Finding | None:
    number = draft.config.get("num_hidden_layers", 0)
    names = draft.tensor_names
    if not any(name.startswith(f"model.layers.{number}.") for name in names):
        return Finding(  # `deepseek_mtp.py:505`
            "load",
            f"ValueError: MTP speculative decoding layer {number} weights missing from checkpoint.",
            f"name the tensors model.layers.{number}, or serve SGLang's export with SGLang",
        )
    corrected = any(name.endswith("e_score_correction_bias") for name in names)
    if corrected and "topk_method" not in draft.config:
        name = f"model.layers.{number}.mtp_block.mlp.gate.e_score_correction_bias"
        text = NO_PARAMETER.format(name=name)
        return Finding("load", text, "add topk_method: noaux_tc to config.json")
    return None


def _in_sglang(_draft: ServedDraft) -> Finding | None:
    what = "Loading kv_b_proj of this draft needs a GPU, and SGLang was executed without one"
    return Finding("unknown", what, "try it")


_TRAITS = mtp_traits(
    frozenset({"DeepseekV3ForCausalLM"}),
    vllm=MtpLayer(
        layer="model.layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
        no_parameter=NO_PARAMETER,
        misconfigured=_in_vllm,
        lists_parts=True,
    ),
    sglang=MtpLayer(
        layer="model.decoder.",
        prefix="model.decoder.",
        most_modules=1,  # `deepseek_weight_loader.py:567`; executed
        misconfigured=_in_sglang,
    ),
    more_in_sglang=frozenset({"DeepseekV3ForCausalLMNextN"}),
)
ENGINE_TRAITS = replace(_TRAITS, latent=True)
