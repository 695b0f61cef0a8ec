"""Names of architectures that mean the same draft.

Sources: `models/registry.py` of vLLM 0.33.0, and its `EAGLEConfig`, which puts "Eagle3" before the
name of an ordinary model; `EntryClass` of SGLang 0.5.23; TensorRT-LLM.
"""

from collections.abc import Collection, Mapping
from typing import Any

_OF_DRAFTS: Mapping[str, str] = {
    "EAGLE3LlamaForCausalLM": "LlamaForCausalLMEagle3",  # TensorRT-LLM
    "Eagle3LlamaForCausalLM": "LlamaForCausalLMEagle3",
    "Eagle3MiniMaxM2ForCausalLM": "LlamaForCausalLMEagle3",
    "Eagle3Qwen2_5vlForCausalLM": "LlamaForCausalLMEagle3",
    "Eagle3Qwen3vlForCausalLM": "LlamaForCausalLMEagle3",
    "Eagle3DeepSeekV3ForCausalLM": "Eagle3DeepseekV2ForCausalLM",  # TensorRT-LLM
    "Eagle3DeepseekV3ForCausalLM": "Eagle3DeepseekV2ForCausalLM",
    "CosyVoice3Eagle3LlamaForCausalLM": "LlamaForCausalLMEagle3",  # AngelSlim, as it trains
    "QwenDFlashDraftModel": "DFlashDraftModel",  # likewise
    "LingDSparkModel": "Qwen3DSparkModel",  # SGLang, of the target's family
    "MiniMaxDFlash2DraftModel": "DFlash2DraftModel",  # SGLang
    "PeagleLlamaForCausalLM": "PEagleDraftModel",  # vLLM, of speculators' config
}
_OF_MODELS: Mapping[str, str] = {
    "LlamaForCausalLM": "LlamaForCausalLMEagle3",
    "Qwen3ForCausalLM": "Eagle3Qwen3ForCausalLM",
    "DeepseekV2ForCausalLM": "Eagle3DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "Eagle3DeepseekV2ForCausalLM",
}
_WITH_MASK: Mapping[str, str] = {
    "LlamaForCausalLMEagle3": "PEagleDraftModel",
    "Eagle3Qwen3ForCausalLM": "PeagleQwen3ForCausalLM",
}
"""EAGLE-3 heads that have a mask_hidden as well -> P-EAGLE's name of the same layers."""
KNOWN_TO_BOTH = frozenset(
    {
        "LlamaForCausalLMEagle3",
        "Eagle3DeepseekV2ForCausalLM",
        "DFlashDraftModel",
        "DFlash2DraftModel",
        "Qwen3DSparkModel",
    }
)
"""Names that vLLM and SGLang both have, for a draft and nothing else."""
OTHER_NAMES: Mapping[str, str] = {**_OF_DRAFTS, **_OF_MODELS}
"""Of drafts -> the one that the families read, and that most engines have."""


def declared_architecture(config: Mapping[str, Any]) -> str:
    """The one name in architectures of a config.json; "" where there is not exactly one."""
    declared = config.get("architectures")
    names = declared if isinstance(declared, list) else []
    return names[0] if len(names) == 1 and isinstance(names[0], str) else ""


def with_family_name(
    config: Mapping[str, Any], tensors: Collection[str], projectors: Mapping[str, str]
) -> Mapping[str, Any]:
    """A config.json under the name that the families read, where it has another one.

    Args:
        tensors: names in the folder: of an ordinary model none is a hidden_norm, EAGLE-3's own.
        projectors: projector_type of a DFlashDraftModel, as ModelOpt names all of its block drafts
            -> the name that the family reads.
    """
    name = declared_architecture(config)
    projector = projector_type(config)
    if name == "DFlashDraftModel" and projector in tuple(projectors):  # of any JSON type
        return {**config, "architectures": [projectors[projector]]}
    ordinary = name in _OF_MODELS and not any(t.endswith("hidden_norm.weight") for t in tensors)
    found = name if ordinary else OTHER_NAMES.get(name, name)
    if any(tensor.endswith("mask_hidden") for tensor in tensors):
        found = _WITH_MASK.get(found, found)
    return config if found == name else {**config, "architectures": [found]}


def projector_type(config: Mapping[str, Any]) -> Any:
    """Of a block draft; that of dflash_config goes first: SGLang 0.5.23 `dflash_utils.py:727`."""
    nested = config.get("dflash_config")
    return {**config, **(nested if isinstance(nested, Mapping) else {})}.get("projector_type")
