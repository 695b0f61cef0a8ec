"""The main branch of TensorRT-LLM as it was read."""

from .. import tensorrt_llm
from ..contract import Engine

ENGINE = Engine(
    name="tensorrt-llm",
    version="main at 008e0af8",
    evidence="its public source was read, in parts; never executed",
    archs=("sm90", "sm100"),
    architectures=frozenset(
        {
            "LlamaForCausalLMEagle3",
            "EAGLE3LlamaForCausalLM",
            "Eagle3DeepseekV2ForCausalLM",
            "Eagle3DeepSeekV3ForCausalLM",
            "DFlashDraftModel",
        }
    ),
    methods=frozenset({"quark", "compressed-tensors", "modelopt", "fp8", "awq", "gptq"}),
    unknown_method="",
    no_method=None,
    schemes=tensorrt_llm.SCHEMES,
    modules=tensorrt_llm.no_modules,
    plain=lambda _question: frozenset(),
    exclude_rules={},
    config_problem=tensorrt_llm.config_problem,
    module_problem=lambda _question, _module, _scheme, _shapes: None,
    launch=tensorrt_llm.launch,
)
