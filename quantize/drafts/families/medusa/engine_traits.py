"""Medusa in engines: none of those that are known has it any more."""

from ...engine_traits import EngineTraits, InSglang, InVllm

_SERVE = "serve it with vLLM 0.32, the last that has Medusa; in floats (draftquant dequantize)"
ENGINE_TRAITS = EngineTraits(
    own_types={"medusa": _SERVE},
    vllm=InVllm(
        refused_names={"MedusaModel": _SERVE}, unknown_tensors="unknown", floats_into_fp8="unknown"
    ),
    sglang=InSglang(
        refused_names={"MedusaModel": _SERVE}, unknown_tensors="unknown", floats_into_fp8="unknown"
    ),
)
