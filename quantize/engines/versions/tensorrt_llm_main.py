"""The main branch of TensorRT-LLM as it was read."""

from .. import tensorrt_llm
from ..engine import ConfigRules, DeclarationRules, Engine, LinearRules, TensorRules

ENGINE = Engine(
    name="tensorrt-llm",
    version="main at 008e0af8",
    evidence="its public source was read in parts, and it was never executed",
    archs=("sm90", "sm100"),
    own=lambda traits: traits.tensorrt_llm,
    config=ConfigRules(problem=tensorrt_llm.config_problem),
    declaration=DeclarationRules(
        methods=frozenset({"quark", "compressed-tensors", "modelopt", "fp8", "awq", "gptq"}),
        unknown_method="",
        no_method=None,
        schemes=tensorrt_llm.SCHEMES,
        exclude_rules={},
    ),
    linears=LinearRules(
        modules=tensorrt_llm.no_modules,
        plain=lambda _question: frozenset(),
        problem=lambda _question, _module, _scheme, _shapes: None,
    ),
    tensors=TensorRules(),
    launch=tensorrt_llm.launch,
)
