"""How vLLM 0.33.0 reads config.json before anything else: names of architectures, speculators.

Sources: `EAGLEConfig`, `SpeculatorsConfig` and `algos.py` of `vllm/transformers_utils/configs`,
executed (`tests/engines/RESULTS.md`), whose error texts these are.
"""

from ..drafts.architectures import OTHER_NAMES
from .contract import Finding

INVALID = "ValidationError: 1 validation error for SpeculativeConfig Value error, {}"
UNSUPPORTED = INVALID.format("Model architectures ['{}'] are not supported for now.")

ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
        "LlamaForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        "Qwen3ForCausalLM",
        "Eagle3DeepseekV2ForCausalLM",
        "Eagle3DeepseekV3ForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DFlashDraftModel",
    }
)
_NOT_EXECUTED = frozenset(
    {
        "MiniMaxM2ForCausalLM",
        "LagunaForCausalLM",
        "DFlashLagunaForCausalLM",
        "DFlash2DraftModel",
        "DFlash2BeamDraftModel",
        "LiLiCorrDraftModel",
        "MuseGlimmerAssistantModel",
        "DFlashMuseGlimmerAssistantModel",
        "Qwen3XPressModel",
        "DFlashQwen3XPressModel",
        "Qwen3DSparkModel",
        "Qwen3OmniDSparkModel",
        "DSparkDraftModel",
        "DSparkV41DraftModel",
        "K3DSparkModel",
        "MuseSparkDSparkModel",
        "Gemma4DSparkModel",
    }
)
"""Other names of drafts that are registered, under methods and with tensors of their own."""


def architecture_problem(name: str) -> Finding | None:
    """No other name is registered, alone or behind the "Eagle3" that `EAGLEConfig` puts first."""
    if not name or name in ARCHITECTURES or name in _NOT_EXECUTED:
        return None
    wanted = OTHER_NAMES.get(name) or "the one of its family, such as LlamaForCausalLMEagle3"
    return Finding("config", UNSUPPORTED.format(name), f"set architectures to {wanted}")
