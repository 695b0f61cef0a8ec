"""vLLM 0.33.0."""

from .. import mtp, vllm, vllm_config, vllm_heads, vllm_speculators
from ..captured import vllm_captures
from ..contract import DFLASH_FAMILIES, Engine
from ..vllm_schemes import SCHEMES

_FAMILIES = (
    frozenset({"eagle3-llama", "eagle3-mla", "eagle1-llama", "language-model", *mtp.VLLM})
    | DFLASH_FAMILIES
)
_LLAMA_HEADS = (
    "AssertionError: vllm/model_executor/models/llama.py:145: assert self.total_num_heads % tp_size"
    " == 0"
)
ENGINE = Engine(
    name="vllm",
    version="0.33.0",
    evidence="loading executed on a CPU with vLLM 0.33.0's own classes; no kernel was run",
    archs=("sm90", "sm100"),
    other_archs=("sm80", "gfx942"),
    architectures=vllm_config.ARCHITECTURES,
    architecture_problem=vllm_config.architecture_problem,
    plain_config=vllm_speculators.plain_config,
    methods=vllm.METHODS,
    aliases={
        "compressed_tensors": "compressed-tensors",
        "modelopt_fp8": "modelopt",
        "modelopt_fp4": "modelopt",
        "awq_marlin": "awq",
        "auto_awq": "awq",
        "gptq_marlin": "gptq",
        "auto_gptq": "gptq",
        "inc": "auto-round",
    },
    other_keys=("compression_config",),
    unknown_method=vllm.UNKNOWN_METHOD,
    no_method=None,
    taken=vllm.taken,
    schemes=SCHEMES,
    modules=vllm.modules,
    plain=vllm_heads.plain,
    plain_remedies={
        (family, "lm_head"): f"write {vllm_heads.OWN_HEAD}: true into config.json"
        for family in DFLASH_FAMILIES
    },
    exclude_rules=vllm.EXCLUDE_RULES,
    config_problem=vllm_config.config_problem,
    captures=vllm_captures,
    module_problem=vllm.module_problem,
    biases=vllm_config.biases,
    reads_cache_scale=vllm_config.reads_cache_scale,
    refuses_unwritten=frozenset({"language-model"}),
    refuses_unknown=_FAMILIES,
    casts=_FAMILIES,
    rooted=vllm_config.ROOTED,
    dropped={"eagle3-llama": ("input_norm.",)},
    later_norm="input_layernorm",
    embedding_rows="AssertionError: vllm/model_executor/layers/vocab_parallel_embedding.py:515:"
    " assert loaded_weight.shape[output_dim] == self.org_vocab_size",
    null_base="TypeError: unsupported operand type(s) for ** or pow(): 'NoneType' and 'Tensor'",
    uneven_heads={
        "eagle3-llama": _LLAMA_HEADS,
        "eagle1-llama": _LLAMA_HEADS,
        "eagle3-mla": "AssertionError: vllm/model_executor/models/deepseek_v2.py:1041: assert"
        " num_heads % tp_size == 0",
        **dict.fromkeys(
            DFLASH_FAMILIES,
            "AssertionError: vllm/model_executor/models/qwen3_dflash.py:191: assert"
            " self.total_num_heads % tp_size == 0",
        ),
    },
    scale_shape="AssertionError: vllm/model_executor/parameter.py:92: assert self.data.shape =="
    " loaded_weight.shape or self._is_1d_and_scalar(",
    targets_on_disk=frozenset(("modelopt", family) for family in DFLASH_FAMILIES),
    absent_tables={
        "embed_tokens": "embed_tokens is not stored: the target's is served, in one pipeline stage",
        "lm_head": "lm_head is not stored: the target's is served",
    },
    absent_head=dict.fromkeys(
        ("modelopt nvfp4 nvfp4", "modelopt nvfp4 none"),
        "RuntimeError: NVFP4 weight_scale for layer 'parallel_lm_head' was never loaded"
        " (still NaN).",
    ),
    checks_shapes=True,
    launch=vllm.launch,
)
