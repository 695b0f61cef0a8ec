"""vLLM 0.33.0."""

from ...drafts.architectures import declared_architecture
from .. import vllm_config as config
from .. import vllm_config as declarations
from .. import vllm_linears as cache_scales
from .. import vllm_linears as modules
from .. import vllm_linears as quantized_head
from ..captured_layers import Captures, vllm_captures
from ..config_rules import NULL_BASE
from ..contract import Question
from ..engine import ConfigRules, DeclarationRules, Engine, LinearRules, TensorRules
from ..vllm import cut_head
from ..vllm.launch import launch
from ..vllm.schemes import SCHEMES
from ..vllm_config import plain_config


def _captures(question: Question) -> Captures:
    name = declared_architecture(question.config)
    return vllm_captures(question.config, runs_v1=name not in question.traits.vllm.not_in_v1)


ENGINE = Engine(
    name="vllm",
    version="0.33.0",
    evidence="loading was executed on a CPU with vLLM 0.33.0's own classes; no kernel was run",
    archs=("sm90", "sm100"),
    other_archs=("sm80", "gfx942"),
    checked_archs=("gfx950",),
    own=lambda traits: traits.vllm,
    config=ConfigRules(
        architecture_problem=config.architecture_problem,
        plain=plain_config,
        problem=config.config_problem,
        captures=_captures,
        null_errors={
            "rope_theta": NULL_BASE,
            "eagle_config": "AttributeError: 'NoneType' object has no attribute 'update'",
            "dflash_config": "TypeError: 'NoneType' object is not iterable",
        },
    ),
    declaration=DeclarationRules(
        methods=declarations.METHODS,
        aliases={
            "compressed_tensors": "compressed-tensors",
            "modelopt_fp8": "modelopt",
            "modelopt_fp4": "modelopt",
            "awq_marlin": "awq",
            "auto_awq": "awq",
            "gptq_marlin": "gptq",
            "auto_gptq": "gptq",
            "inc": "auto-round",
            "modelopt_mxfp8": "modelopt",
        },
        other_keys=("compression_config",),
        unknown_method=declarations.UNKNOWN_METHOD,
        no_method=None,
        taken=declarations.taken,
        schemes=SCHEMES,
        exclude_rules=modules.EXCLUDE_RULES,
        experts_by_name=frozenset({"quark", "compressed-tensors", "fp8", "modelopt"}),
    ),
    linears=LinearRules(
        modules=modules.modules,
        plain=quantized_head.plain,
        plain_remedy=quantized_head.plain_remedy,
        problem=modules.module_problem,
        biases=config.biases,
    ),
    tensors=TensorRules(
        cache_scale=cache_scales.cache_scale,
        later_norm="input_layernorm",
        embedding_rows="AssertionError: vllm/model_executor/layers/vocab_parallel_embedding.py:515:"
        " assert loaded_weight.shape[output_dim] == self.org_vocab_size",
        absent_tables={
            "embed_tokens": "embed_tokens is not stored, so vLLM serves the target's, in one"
            " pipeline stage",
            "lm_head": "lm_head is not stored, so vLLM serves the target's",
        },
        absent_head=dict.fromkeys(
            ("modelopt nvfp4 nvfp4", "modelopt nvfp4 none"),
            "RuntimeError: NVFP4 weight_scale for layer 'parallel_lm_head' was never loaded"
            " (still NaN).",
        ),
        cut_head=cut_head.cut_head,
        checks_shapes=True,
        scale_shape="AssertionError: vllm/model_executor/parameter.py:92: assert self.data.shape =="
        " loaded_weight.shape or self._is_1d_and_scalar(",
    ),
    launch=launch,
)
