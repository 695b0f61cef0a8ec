"""How vLLM 0.33.0 reads config.json before anything else: names of architectures, speculators.

Sources: `EAGLEConfig`, `SpeculatorsConfig` and `algos.py` of `vllm/transformers_utils/configs`,
executed (`tests/engines/RESULTS.md`), whose error texts these are.
"""

import re
from collections.abc import Mapping
from typing import Any

from ...drafts.architectures import declared_architecture
from ...drafts.config_defaults import REWRITTEN_BY_VLLM
from ...drafts.engine_traits import INVALID, UNSUPPORTED, Biases, EngineTraits, Finding
from ...drafts.unsupported import nested_eagle_keys
from .. import mtp
from ..config_rules import NO_NAME, OF_LAYERS
from ..contract import Question
from ..engine import TRAITS

ARCHITECTURES = frozenset().union(*(traits.vllm.architectures for traits in TRAITS))
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
        "DSparkV41DraftModel",
        "K3DSparkModel",
        "MuseSparkDSparkModel",
        "Gemma4DSparkModel",
        *(name for traits in TRAITS for name in traits.vllm.not_executed),
    }
)
"""Other names of drafts that are registered, under methods and with tensors of their own."""
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_OF_MTP = re.compile(r"NextN$|MTP|^(?!.*(eagle|dflash|dspark)).*For(CausalLM|Conditional)", re.I)
_REWRITTEN = re.compile(
    r"(deepseek_(v3|v32|v4|v41|mtp)|glm_moe_dsa|glm5_next|dots3_note|pangu_ultra_moe|kimi_k3"
    r"|ernie4_5_moe|ernie|nemotron_h(_puzzle)?|qwen3_next|qwen4_exp(_text)?|qwen3_5(_moe)?(_text)?"
    r"|bailing_hybrid(_v3)?|exaone_moe|exaone4_5|intern_s2_preview|interns2_mobius|longcat_flash"
    r"|step3p[57]|step5(_vl)?|hy_v[34]|inkling(_mm)?_model|gemma4(_unified)?_assistant"
    r"|minimax_m3(_vl)?|mimo(_v2)?|glm4_moe(_lite)?|glm_ocr)(_mtp)?"
)
"""model_types for which it writes the name of an MTP layer: `config/speculative.py:711`."""


def rewritten(traits: EngineTraits | None, config: Mapping[str, Any]) -> Finding | None:
    """The error for a draft whose model_type is one of targets with an MTP layer."""
    model_type = config.get("model_type")
    if not (traits and traits.usual_type) or model_type not in tuple(REWRITTEN_BY_VLLM):
        return None
    name = REWRITTEN_BY_VLLM[model_type]
    error = UNSUPPORTED.format(f"{'DFlash' if traits.drafts_blocks else 'Eagle3'}{name}")
    what = f"set model_type to {traits.usual_type}: {model_type} is rewritten to the MTP model"
    return Finding("config", error, what)


def architecture_problem(config: Mapping[str, Any]) -> Finding | None:
    """No other name is registered, alone or behind the "Eagle" or "Eagle3" of `EAGLEConfig`."""
    name, model_type = declared_architecture(config), config.get("model_type")
    if model_type == "eagle":  # which reads the keys below "model", and is EAGLE-1 by default
        return _of_eagle_config(config)
    if not config.get("architectures"):
        return Finding("config", NO_NAME, "")
    if not name or name in ARCHITECTURES or name in _NOT_EXECUTED:
        return None
    if _OF_MTP.search(name) and _REWRITTEN.fullmatch(str(model_type)):
        return None
    return Finding("config", UNSUPPORTED.format(name), "")


def _of_eagle_config(config: Mapping[str, Any]) -> Finding:
    nested = nested_eagle_keys(config)
    if nested is None:
        text = "Assertion failed, model should not be None when method is eagle"
        return Finding("config", INVALID.format(text), OF_LAYERS)
    name = declared_architecture(nested)
    return Finding("config", UNSUPPORTED.format(f"Eagle{name}") if name else NO_NAME, "")


def biases(question: Question) -> Biases:
    """Those of the family's class; of latent attention nothing is known."""
    latent = question.is_latent and not question.traits.drafts_blocks
    return (None, None) if latent else question.own.biases(question)


def _no_mask(question: Question) -> Finding | None:
    """`get_parallel_drafting_token_id` of `v1/worker/gpu/spec_decode/utils.py:92`, of a server."""
    nested = question.config.get("dflash_config")
    said = {**question.config, **(nested if isinstance(nested, Mapping) else {})}
    if not question.traits.drafts_blocks or any(said.get(key) is not None for key in _MASK_KEYS):
        return None
    text = "ValueError: Model config must specify `dflash_config.mask_token_id`,"
    return Finding("init", text, "add mask_token_id, as the draft was trained with it")


def config_problem(question: Question) -> Finding | None:
    """Rules of `SpeculativeConfig`, of the family's loader, and of a head of fewer tokens."""
    if question.own.mtp is not None:
        return mtp.vllm_problem(question, question.own.mtp)
    problem = (
        rewritten(question.traits, question.config)
        or question.own.problem(question)
        or _no_mask(question)
    )
    if problem is not None or not question.traits.prunes_vocabulary:
        return problem
    size, whole = question.config.get("draft_vocab_size"), question.config.get("vocab_size")
    if size in (None, whole) and "d2t" in question.tensor_names:
        text = "ValueError: There is no module or parameter named 'draft_id_to_target_id'"
        pruned = question.head_rows not in (None, whole)
        remedy = "add draft_vocab_size to config.json" if pruned else "remove d2t and t2d"
        return Finding("load", text, remedy)
    rows = question.head_rows
    if size is None and rows is not None and rows != whole:
        return Finding(
            "load",
            "AssertionError: vllm/model_executor/layers/vocab_parallel_embedding.py:515: assert"
            " loaded_weight.shape[output_dim] == self.org_vocab_size",
            f"add draft_vocab_size {rows} to config.json, and the map d2t",
        )
    return None
