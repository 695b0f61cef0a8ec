"""How vLLM 0.33.0 reads config.json before anything else: names of architectures, speculators.

Sources: `EAGLEConfig`, `SpeculatorsConfig` and `algos.py` of `vllm/transformers_utils/configs`,
executed (`tests/engines/RESULTS.md`), whose error texts these are.
"""

import re
from collections.abc import Mapping

from ..drafts.architectures import DOMINO, OTHER_NAMES, declared_architecture
from ..drafts.families.eagle3_llama.names import MASK_KEYS
from . import dspark, mtp
from .biases import ATTENTION, INPUTS, MLP
from .contract import Biases, Finding, Question
from .misnamed import MEDUSA, MEDUSA_NAME, eagle1_biases, strip_root
from .outside import CACHE_SCALE, is_latent, is_parallel

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
        "DFlash2DraftModel",
        *dspark.ARCHITECTURES,
        "EagleLlamaForCausalLM",
        "Qwen2ForCausalLM",
        *mtp.architectures(mtp.VLLM),
    }
)
_EAGLE1 = ("EagleLlamaForCausalLM", "LlamaForCausalLM")
"""Of EAGLE-1's names: it puts "Eagle" before the name of an ordinary model."""
_NOT_EXECUTED = frozenset(
    {
        "MiniMaxM2ForCausalLM",
        "LagunaForCausalLM",
        "DFlashLagunaForCausalLM",
        "DFlash2BeamDraftModel",
        "LiLiCorrDraftModel",
        "MuseGlimmerAssistantModel",
        "DFlashMuseGlimmerAssistantModel",
        "Qwen3XPressModel",
        "DFlashQwen3XPressModel",
        "Qwen3OmniDSparkModel",
        "DSparkV41DraftModel",
        "K3DSparkModel",
        "MuseSparkDSparkModel",
        "Gemma4DSparkModel",
        *mtp.NOT_EXECUTED,
    }
)
"""Other names of drafts that are registered, under methods and with tensors of their own."""
_WITH_CACHE_SCALES = frozenset({"fp8", "compressed-tensors", "modelopt"})
"""Each quant_method with which scales of the KV cache were loaded."""
_OF_MTP = re.compile(r"NextN$|MTP")
"""Names whose config it rewrites, by model_type, to one that is registered."""


def _roots(class_name: str, *names: str) -> dict[str, Finding]:
    """It puts "model." before every name but that of the head: `llama_eagle3.py:444`."""
    text = f"ValueError: There is no module or parameter named '{{}}' in {class_name}."
    return {
        f"{name}.": Finding("load", text.format(name), strip_root(f"{name}.")) for name in names
    }


ROOTED: Mapping[str, Mapping[str, Finding | None]] = {
    "eagle3-llama": _roots("LlamaModel", "model", "draft_model", "eagle_module"),
    "eagle3-mla": _roots("DeepseekV2Eagle3Model", "model"),
    "dflash": _roots("DFlashQwen3Model", "draft_model", "dflash_module"),
    "domino": _roots("DFlashQwen3Model", "draft_model", "dflash_module"),
    "dflash2": _roots("DFlash2Qwen3Model", "draft_model", "dflash_module"),
    "dspark": _roots("Qwen3DSparkModel", "draft_model", "dflash_module", "model", "logit_head"),
    "eagle1-llama": _roots("LlamaModel", "model"),
    "language-model": {"model.": None},
}


def architecture_problem(name: str) -> Finding | None:
    """No other name is registered, alone or behind the "Eagle3" that `EAGLEConfig` puts first."""
    if not name or name in ARCHITECTURES or name in _NOT_EXECUTED or _OF_MTP.search(name):
        return None
    if name == DOMINO:
        text = "serve it with SGLang, as DFlashDraftModel: vLLM has nothing like Domino"
        return Finding("config", UNSUPPORTED.format(name), text)
    if name == MEDUSA_NAME:
        return Finding("config", UNSUPPORTED.format(name), MEDUSA)
    wanted = OTHER_NAMES.get(name) or "the one of its family, such as LlamaForCausalLMEagle3"
    return Finding("config", UNSUPPORTED.format(name), f"set architectures to {wanted}")


def biases(question: Question) -> Biases:
    """`llama.py:267` has both, `qwen3_dflash.py` those of the attention, `qwen3.py` its inputs'."""
    name = declared_architecture(question.config)
    if question.is_dflash:
        return (ATTENTION, frozenset())
    if is_latent(question):
        return (None, None)
    if question.family in mtp.VLLM:
        return (INPUTS, None)
    if question.family != "language-model":
        return (None, None) if question.normed_heads else (ATTENTION, MLP)
    if name == "LlamaForCausalLM":
        return (ATTENTION, MLP)
    return (INPUTS if question.normed_heads else None, frozenset())


def reads_cache_scale(question: Question, name: str) -> bool | None:
    """`base_config.py` maps every spelling; MLA's attention has another name."""
    if question.method is None or is_latent(question):
        return False
    known = question.method in _WITH_CACHE_SCALES and question.family not in mtp.VLLM
    return True if known and CACHE_SCALE.search(name) else None


def config_problem(question: Question) -> Finding | None:
    """Rules of `SpeculativeConfig`, of the Llama draft's loader and of DFlash's."""
    if question.family == "dspark":
        return dspark.vllm_problem(question)
    if question.family == "domino":
        return Finding(
            "load",
            "ValueError: There is no module or parameter named 'embed_proj' in DFlashQwen3Model.",
            "serve it with SGLang: vLLM has nothing like Domino",
        )
    if question.family in mtp.VLLM:
        return mtp.vllm_problem(question)
    if question.family == "eagle1-llama":
        return _eagle1_problem(question)
    if question.family == "language-model":
        return None
    if is_parallel(question) and all(question.config.get(key) is None for key in MASK_KEYS):
        text = "ValueError: For parallel drafting, the draft model config must have"
        return Finding("init", f"{text} `dflash_config.mask_token_id`,", "add 'mask_token_id'")
    if question.family == "eagle3-mla" and question.config.get("model_type") == "deepseek_v3":
        return Finding(
            "config",
            UNSUPPORTED.format("Eagle3DeepSeekMTPModel"),
            "set model_type to kimi_k2: deepseek_v3 is rewritten to the MTP model",
        )
    if question.family == "eagle3-mla" and not question.fuses:
        text = "never written: model.fc.weight, which vLLM builds for latent attention in any case"
        return Finding("wrong", text, "serve it with SGLang")
    size, whole = question.config.get("draft_vocab_size"), question.config.get("vocab_size")
    if not question.is_dflash and size in (None, whole) and "d2t" in question.tensor_names:
        text = "ValueError: There is no module or parameter named 'draft_id_to_target_id'"
        pruned = question.head_rows not in (None, whole)
        remedy = "add draft_vocab_size to config.json" if pruned else "remove d2t and t2d"
        return Finding("load", text, remedy)
    if not question.is_dflash and size is None:
        rows, vocab = question.head_rows, question.config.get("vocab_size")
        if rows is not None and rows != vocab:
            return Finding(
                "load",
                "AssertionError: vllm/model_executor/layers/vocab_parallel_embedding.py:515: assert"
                " loaded_weight.shape[output_dim] == self.org_vocab_size",
                f"add draft_vocab_size {rows} to config.json, and the map d2t",
            )
    return None


def _eagle1_problem(question: Question) -> Finding | None:
    """Rules of `llama_eagle.py`, whose fc has no bias, and which builds no head."""
    name = declared_architecture(question.config)
    if name not in _EAGLE1:
        asked = name if name.startswith("Eagle") else f"Eagle{name}"
        return Finding("config", UNSUPPORTED.format(asked), "serve it with SGLang")
    if any(tensor.endswith("lm_head.weight") for tensor in question.tensor_names):
        return Finding(
            "load",
            "ValueError: There is no module or parameter named 'lm_head' in EagleLlamaForCausalLM.",
            "leave the head out: the target's is served",
        )
    if "fc.bias" in question.tensor_names:
        text = "dropped: fc.bias, which vLLM's fc has not"
        return Finding("wrong", text, "serve it with SGLang, or train the draft without it")
    return eagle1_biases(question)
