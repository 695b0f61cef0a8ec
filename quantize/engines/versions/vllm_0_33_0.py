"""vLLM 0.33.0."""

from .. import vllm
from ..contract import Engine, Finding
from ..vllm_schemes import SCHEMES

_FAMILIES = frozenset({"eagle3-llama", "eagle3-mla", "dflash"})
ENGINE = Engine(
    name="vllm",
    version="0.33.0",
    evidence="loading executed on a CPU with vLLM 0.33.0's own classes; no kernel was run",
    archs=("sm90", "sm100"),
    architectures={
        "LlamaForCausalLMEagle3": "eagle3-llama",
        "Eagle3DeepseekV2ForCausalLM": "eagle3-mla",
        "DFlashDraftModel": "dflash",
    },
    refused_architectures={
        "EAGLE3LlamaForCausalLM": Finding(
            "config",
            vllm.UNSUPPORTED.format("EAGLE3LlamaForCausalLM"),
            "set architectures to LlamaForCausalLMEagle3",
        )
    },
    methods=vllm.METHODS,
    unknown_method=vllm.UNKNOWN_METHOD,
    no_method=None,
    taken=vllm.taken,
    schemes=SCHEMES,
    modules=vllm.modules,
    plain=vllm.plain,
    exclude_rules=vllm.EXCLUDE_RULES,
    config_problem=vllm.config_problem,
    module_problem=vllm.module_problem,
    refuses_unknown=_FAMILIES,
    casts=_FAMILIES,
    launch=vllm.launch,
)
