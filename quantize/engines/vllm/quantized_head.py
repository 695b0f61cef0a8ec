"""Which drafts hand vLLM 0.33.0 a head that may be quantized, and what becomes of it.

Sources: loading executed (`tests/engines/RESULTS.md`); `llama_eagle3.py:332`, `qwen3_eagle3.py:308`
and `qwen3_dflash.py:755` give ParallelLMHead a config, `deepseek_eagle3.py:225` gives it none.
"""

from ...drafts.engine_traits import Finding
from ..contract import Module, Question
from ..linear_scheme import LinearScheme
from ..name_patterns import extra_heads

OWN_HEAD = "has_own_lm_head"
"""The key of config.json by which DFlash hands its head the declaration: `qwen3_dflash.py:760`."""
_METHODS = frozenset({"modelopt", "compressed-tensors"})
"""Each quant_method that has a way for heads: `compressed_tensors.py:186`, `modelopt.py:254`."""


def plain(question: Question) -> frozenset[str]:
    """The head, where the class hands it no config or the method knows no heads."""
    heads = {"lm_head", *extra_heads(question)}
    if question.method in _METHODS:
        heads = set() if _hands(question) else {"lm_head"}
    others = {each.leaf for each in question.traits.extra_linears if not each.is_head}
    return frozenset({*others, *heads})


def plain_remedy(question: Question, leaf: str) -> str | None:
    """The key that hands a block draft's head the declaration."""
    if leaf == "lm_head" and question.traits.drafts_blocks:
        return f"write {OWN_HEAD}: true into config.json"
    return None


def head_problem(question: Question, module: Module, scheme: LinearScheme) -> Finding | None:
    """`_should_share` compares `weight` with the target's, and packed integers have none.

    Source: `v1/worker/gpu/spec_decode/eagle/utils.py:31`, of the V2 model runner, the default one;
    that of V1 looks whether there is a weight (`llm_base_proposer.py:1527`). A language model's
    head is never shared (`standalone_ar/speculator.py`).
    """
    packed = scheme.suffix == "weight_packed" and scheme.weight_dtype.startswith("int")
    own = question.config.get(OWN_HEAD) or question.traits.whole_model
    if module.leaf != "lm_head" or not packed or own:
        return None
    return Finding(
        "after load",
        "AttributeError: 'ParallelLMHead' object has no attribute 'weight'",
        "quantize the head to FP8, or serve with the V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0)",
    )


def _hands(question: Question) -> bool:
    declared = question.traits.vllm.head_declared
    return declared == "always" or (declared == "asked" and bool(question.config.get(OWN_HEAD)))
