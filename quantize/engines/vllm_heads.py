"""Which drafts hand vLLM 0.33.0 a head that may be quantized, and what becomes of it.

Sources: loading executed (`tests/engines/RESULTS.md`); `llama_eagle3.py:332`, `qwen3_eagle3.py:308`
and `qwen3_dflash.py:755` give ParallelLMHead a config, `deepseek_eagle3.py:225` gives it none.
"""

from .contract import Finding, Module, Question
from .dspark import MARKOV
from .linear_scheme import LinearScheme
from .linears import SELECTOR

OWN_HEAD = "has_own_lm_head"
"""The key of config.json by which DFlash hands its head the declaration: `qwen3_dflash.py:760`."""
_METHODS = frozenset({"modelopt", "compressed-tensors"})
"""Each quant_method that has a way for heads: `compressed_tensors.py:186`, `modelopt.py:254`."""


def plain(question: Question) -> frozenset[str]:
    """The head, where the class hands it no config or the method knows no heads."""
    heads = set() if question.method in _METHODS else {MARKOV.leaf}
    if not (_hands(question) and question.method in _METHODS):
        heads.add("lm_head")
    return frozenset({SELECTOR.leaf, *heads})


def head_problem(question: Question, module: Module, scheme: LinearScheme) -> Finding | None:
    """`_should_share` compares `weight` with the target's, and packed integers have none.

    Source: `v1/worker/gpu/spec_decode/eagle/utils.py:31`, of the V2 model runner, the default one;
    that of V1 looks whether there is a weight (`llm_base_proposer.py:1527`). A language model's
    head is never shared (`standalone_ar/speculator.py`).
    """
    packed = scheme.suffix == "weight_packed" and scheme.weight_dtype.startswith("int")
    own = question.config.get(OWN_HEAD) or question.family == "language-model"
    if module.leaf != "lm_head" or not packed or own:
        return None
    return Finding(
        "after load",
        "AttributeError: 'ParallelLMHead' object has no attribute 'weight'",
        "quantize the head to FP8, or serve with the V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0)",
    )


def _hands(question: Question) -> bool:
    if question.family == "dspark":
        return False  # `qwen3_dspark.py:248`
    if question.is_dflash:
        return bool(question.config.get(OWN_HEAD))
    # `llama.py`, `qwen2.py`, `qwen3.py`
    return question.family in ("eagle3-llama", "language-model")
