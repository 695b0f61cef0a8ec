"""The main branch of TensorRT-LLM as it was read."""

from .. import tensorrt_llm
from ..contract import Engine

ENGINE = Engine(
    name="tensorrt-llm",
    version="main at 008e0af8",
    evidence="its public source was read, in parts; never executed",
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
    schemes=tensorrt_llm.SCHEMES,
    modules=tensorrt_llm.no_modules,
    plain=lambda _question: frozenset(),
    exclude_rules={},
    config_problem=tensorrt_llm.config_problem,
    module_problem=lambda _question, _module, _shapes: None,
    launch=tensorrt_llm.launch,
)
