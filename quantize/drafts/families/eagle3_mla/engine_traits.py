"""EAGLE-3 with DeepSeek's latent attention in engines."""

from ...config_reader import KEY, SECTION
from ...engine_traits import (
    EngineTraits,
    Finding,
    Fusion,
    InSglang,
    InTensorRtLlm,
    InVllm,
    ServedDraft,
    dropped_roots,
    refused_roots,
)


def _in_vllm(draft: ServedDraft) -> Finding | None:
    if not draft.fuses:
        text = "model.fc.weight stays uninitialised: vLLM builds fc for every MLA draft"
        return Finding("wrong", text, "serve it with SGLang")
    return None


ENGINE_TRAITS = EngineTraits(
    usual_type="kimi_k2",
    latent=True,
    two_layer_norms=True,
    prunes_vocabulary=True,
    vllm=InVllm(
        architectures=frozenset(
            {
                "Eagle3DeepseekV2ForCausalLM",
                "Eagle3DeepseekV3ForCausalLM",
                "DeepseekV2ForCausalLM",
                "DeepseekV3ForCausalLM",
            }
        ),
        problem=_in_vllm,
        roots=refused_roots("DeepseekV2Eagle3Model", "model"),
        fusion=Fusion(),  # `deepseek_eagle3.py:189`
        uneven_heads="AssertionError: vllm/model_executor/models/deepseek_v2.py:1041: assert"
        " num_heads % tp_size == 0",
        # `deepseek_eagle3.py:225` gives the head no declaration.
    ),
    sglang=InSglang(
        architectures=frozenset({"Eagle3DeepseekV2ForCausalLM"}),
        floats_into_fp8="refused",
        roots=dropped_roots("model."),
        uneven_heads="AssertionError: sglang/srt/models/deepseek_v2.py:2057: assert num_heads %"
        " attn_tp_size == 0",
        layer_name="model.midlayer.{path}",
        layer_prefix="model.{path}",
        fc_sharding="column",
        plain_fc=False,
        most_layers=1,
        fusion=Fusion(  # `kimi_k25_eagle3.py:48,208`
            counted_by=(f"{SECTION}.{KEY}", KEY), counts_empty=True, null_width=""
        ),
    ),
    tensorrt_llm=InTensorRtLlm(
        architectures=frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepSeekV3ForCausalLM"})
    ),
)
