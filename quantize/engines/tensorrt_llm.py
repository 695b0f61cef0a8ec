"""What TensorRT-LLM does with a draft, as far as its public source says: read, never executed.

Facts: `quark` is not handled as a quant_method; of compressed-tensors' 4-bit formats only NVFP4 is;
compressed-tensors FP8 is taken per channel or block only. Everything else is UNKNOWN here.
"""

from collections.abc import Mapping

from .contract import Engine, Finding, Module, Question, Scheme

_USE = "store it in layout modelopt"


def _not_handled(what: str) -> dict[str, Scheme]:
    return {"*": Scheme("none", Finding("config", f"(read, not executed) {what}", _USE))}


_INT4 = _not_handled("compressed-tensors: of 4-bit formats only NVFP4 is supported")
_PER_TENSOR = _not_handled("compressed-tensors FP8: strategy must be 'channel' or 'block'")

SCHEMES: Mapping[str, Mapping[str, Scheme]] = {
    "compressed-tensors int4 channel none": _INT4,
    "compressed-tensors int4 group128 none": _INT4,
    "compressed-tensors int4 channel token-dynamic": _INT4,
    "compressed-tensors int4 group128 token-dynamic": _INT4,
    "compressed-tensors fp8 tensor tensor-static": _PER_TENSOR,
}


def _config_problem(question: Question) -> Finding | None:
    declared = question.declaration
    if declared is not None and declared.method == "quark":
        return Finding("config", "(read, not executed) quant_method quark is not handled", _USE)
    row = SCHEMES.get((declared.signature if declared else None) or "")
    if row is not None:
        return row["*"].problem
    return Finding("unknown", "its source was read for other cases only", "try it")


def _no_modules(_question: Question) -> tuple[Module, ...]:
    return ()


ENGINE = Engine(
    name="tensorrt-llm",
    version="source snapshot",
    evidence="its public source was read; nothing was executed",
    archs=("sm90", "sm100"),
    architectures={
        "LlamaForCausalLMEagle3": "eagle3-llama",
        "EAGLE3LlamaForCausalLM": "eagle3-llama",
        "Eagle3DeepseekV2ForCausalLM": "eagle3-mla",
        "Eagle3DeepSeekV3ForCausalLM": "eagle3-mla",
        "DFlashDraftModel": "dflash",
    },
    methods=frozenset({"quark", "compressed-tensors", "modelopt", "fp8", "awq", "gptq"}),
    unknown_method="",
    no_method=None,
    schemes=SCHEMES,
    modules=_no_modules,
    plain=lambda _question: frozenset(),
    is_excluded=lambda _question, _module, _patterns: False,
    config_problem=_config_problem,
    module_problem=lambda _question, _module, _shapes: None,
    launch=lambda _question, _num_draft_tokens: "",
)
