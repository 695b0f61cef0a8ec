"""How vLLM 0.33.0 reads config.json before anything else: names of architectures, speculators.

Sources: `EAGLEConfig`, `SpeculatorsConfig` and `algos.py` of `vllm/transformers_utils/configs`,
executed (`tests/engines/RESULTS.md`), whose error texts these are.
"""

import re

from ...drafts.architectures import OTHER_NAMES
from ...drafts.engine_traits import UNSUPPORTED, Biases, Finding
from .. import mtp
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
_REFUSED_NAMES = {
    name: remedy for traits in TRAITS for name, remedy in traits.vllm.refused_names.items()
}
_OF_MTP = re.compile(r"NextN$|MTP")
"""Names whose config it rewrites, by model_type, to one that is registered."""


def architecture_problem(name: str) -> Finding | None:
    """No other name is registered, alone or behind the "Eagle3" that `EAGLEConfig` puts first."""
    if not name or name in ARCHITECTURES or name in _NOT_EXECUTED or _OF_MTP.search(name):
        return None
    if name in _REFUSED_NAMES:
        return Finding("config", UNSUPPORTED.format(name), _REFUSED_NAMES[name])
    wanted = OTHER_NAMES.get(name) or "the one of its family, such as LlamaForCausalLMEagle3"
    return Finding("config", UNSUPPORTED.format(name), f"set architectures to {wanted}")


def biases(question: Question) -> Biases:
    """Those of the family's class; of latent attention nothing is known."""
    latent = question.is_latent and not question.traits.drafts_blocks
    return (None, None) if latent else question.own.biases(question)


def config_problem(question: Question) -> Finding | None:
    """Rules of `SpeculativeConfig`, of the family's loader, and of a head of fewer tokens."""
    if question.own.mtp is not None:
        return mtp.vllm_problem(question, question.own.mtp)
    problem = question.own.problem(question)
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
