"""EAGLE-3 with Llama layers in engines, and how vLLM reads its config.json of speculators."""

from collections.abc import Mapping
from typing import Any

from ...config_reader import KEY, SECTION
from ...engine_traits import (
    INVALID,
    EngineTraits,
    Finding,
    Fusion,
    InSglang,
    InTensorRtLlm,
    InVllm,
    ServedDraft,
    Speculators,
    dropped_roots,
    refused_roots,
)

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where vLLM 0.33 looks for the mask token, in this order: `llm_base_proposer.py:361-372`."""
_OF_SPECULATORS = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}


def _in_vllm(draft: ServedDraft) -> Finding | None:
    parallel = any(name.endswith("mask_hidden") for name in draft.tensor_names)
    if parallel and all(draft.config.get(key) is None for key in MASK_KEYS):
        text = "ValueError: For parallel drafting, the draft model config must have"
        return Finding("init", f"{text} `dflash_config.mask_token_id`,", "add 'mask_token_id'")
    slides = "sliding_attention" in (draft.config.get("layer_types") or ())
    if slides and "sliding_window" not in draft.config:  # `llama.py:205`
        text = "AttributeError: 'EAGLEConfig' object has no attribute 'sliding_window'"
        return Finding("init", text, "add sliding_window, or correct layer_types")
    return None


def _eagle3(config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any] | Finding:
    model_type = layers.get("model_type", "llama")
    if model_type not in tuple(_OF_SPECULATORS):  # of any JSON type
        text = INVALID.format(f"Unsupported model_type {model_type} for Eagle3 speculator")
        return Finding("config", text, "serve a draft with layers of Llama or Qwen3")
    return {
        "architectures": [_OF_SPECULATORS[model_type]],
        "norm_before_residual": config.get("norm_before_residual", True),
        "norm_before_fc": config.get("norm_before_fc", False),
        "fc_norm": config.get("fc_norm", False),
        "norm_output": config.get("norm_output", False),
        KEY: config.get(KEY),
    }


def _peagle(config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any] | Finding:
    """`update_peagle`, whose names of architectures are those of EAGLE-3's classes."""
    if "mask_token_id" not in config:
        return Finding("config", "KeyError: 'mask_token_id'", "add it, as the draft was trained")
    found = _eagle3(config, layers)
    if isinstance(found, Finding):
        return found
    own = {key: value for key, value in found.items() if key not in ("fc_norm", "norm_output")}
    residual = config.get("norm_before_residual", False)
    return {**own, "norm_before_residual": residual, "pard_token": config["mask_token_id"]}


ENGINE_TRAITS = EngineTraits(
    usual_type="llama",
    norm_before_fc=True,
    two_layer_norms=True,
    prunes_vocabulary=True,
    vllm=InVllm(
        architectures=frozenset(
            {
                "LlamaForCausalLMEagle3",
                "Eagle3LlamaForCausalLM",
                "Eagle3MiniMaxM2ForCausalLM",
                "Eagle3Qwen2_5vlForCausalLM",
                "Eagle3Qwen3vlForCausalLM",
                "LlamaForCausalLM",
                "Eagle3Qwen3ForCausalLM",
                "Qwen3ForCausalLM",
            }
        ),
        problem=_in_vllm,
        dropped=("input_norm.",),
        roots=refused_roots("LlamaModel", "model", "draft_model", "eagle_module"),
        uneven_heads="AssertionError: vllm/model_executor/models/llama.py:145: assert"
        " self.total_num_heads % tp_size == 0",
        head_declared="always",  # `llama_eagle3.py:332`, `qwen3_eagle3.py:308`
        forgets_attention=True,
        fusion=Fusion(),  # `llama_eagle3.py:209`
        normed_fusion=Fusion(  # `qwen3_eagle3.py:202`
            counted_by=("num_aux_layers", "num_aux_hidden_states", KEY, f"{SECTION}.{KEY}")
        ),
        speculators={"eagle3": Speculators(_eagle3), "peagle": Speculators(_peagle)},
    ),
    sglang=InSglang(
        architectures=frozenset({"LlamaForCausalLMEagle3"}),
        # `load_weights` tries a name as it is first.
        roots={"model.": None, **dropped_roots("draft_model.", "eagle_module.")},
        uneven_heads="AssertionError: sglang/srt/models/llama.py:183: assert"
        " self.total_num_heads % tp_size == 0",
        old_norms=True,
        fusion=Fusion(),  # `llama_eagle3.py:151`
        needs_draft_vocab_size=True,
    ),
    tensorrt_llm=InTensorRtLlm(
        architectures=frozenset({"LlamaForCausalLMEagle3", "EAGLE3LlamaForCausalLM"}), read=True
    ),
)
