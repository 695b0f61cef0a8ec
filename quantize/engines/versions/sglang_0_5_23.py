"""SGLang 0.5.23."""

from .. import mtp, sglang, sglang_config, sglang_launch
from ..captured import sglang_captures
from ..contract import DFLASH_FAMILIES, Engine
from ..sglang_schemes import SCHEMES

_LLAMA = ("eagle3-llama", "eagle1-llama", "language-model")
"""Families whose layers are those of `llama.py`, or of one that loads alike."""
ENGINE = Engine(
    name="sglang",
    version="0.5.23",
    evidence="loading executed on a CPU with SGLang 0.5.23's own classes; no kernel was run",
    archs=("sm90", "sm100", "gfx942"),
    other_archs=("gfx950",),
    architectures=sglang_config.ARCHITECTURES,
    architecture_problem=sglang_config.architecture_problem,
    plain_config=sglang_config.plain_config,
    methods=sglang.METHODS,
    aliases={
        "modelopt_fp8": "modelopt",
        "modelopt_fp4": "modelopt",
        "awq_marlin": "awq",
        "gptq_marlin": "gptq",
    },
    other_keys=("compression_config",),
    unknown_method="ValueError: Unknown quantization method: {}.",
    no_method="ValueError: Unknown quantization method: .",
    taken=sglang.taken,
    schemes=SCHEMES,
    modules=sglang.modules,
    plain=sglang.plain,
    exclude_rules=sglang.EXCLUDE_RULES,
    config_problem=sglang.config_problem,
    captures=sglang_captures,
    module_problem=sglang.module_problem,
    absent_tables={
        table: f"{table} is not stored: the target's is served"
        for table in ("embed_tokens", "lm_head")
    },
    biases=sglang_config.biases,
    reads_cache_scale=sglang_config.reads_cache_scale,
    unshared_head=sglang_config.unshared_head,
    no_target={
        "compressed-tensors": "ValueError: Unable to find matching target for {prefix} in the"
        " compressed-tensors config."
    },
    drops_unknown=frozenset({"eagle3-mla", *_LLAMA, *mtp.SGLANG}) | DFLASH_FAMILIES,
    rooted=sglang_config.ROOTED,
    casts=frozenset(_LLAMA) | DFLASH_FAMILIES,
    refuses_casts=frozenset({"eagle3-mla"}),
    fc_norm_keys=("fc_norm", "use_aux_norm"),
    old_norms=frozenset({"eagle3-llama"}),
    shares=DFLASH_FAMILIES,
    later_norm="hidden_norm",
    embedding_rows="AssertionError: self.org_vocab_size={vocab} self.use_presharded_weights=False"
    " loaded_weight.shape[output_dim]={rows}",
    null_base="TypeError: unsupported operand type(s) for ** or pow(): 'NoneType' and 'Tensor'",
    uneven_heads={
        "eagle3-llama": "AssertionError: sglang/srt/models/llama.py:183: assert"
        " self.total_num_heads % tp_size == 0",
        "eagle3-mla": "AssertionError: sglang/srt/models/deepseek_v2.py:2057: assert num_heads %"
        " attn_tp_size == 0",
        **dict.fromkeys(
            DFLASH_FAMILIES,
            "AssertionError: DFlashAttention requires total_num_heads divisible by tp_size."
            " total_num_heads={heads}, tp_size={tp}.",
        ),
    },
    scale_shape="AssertionError: sglang/srt/layers/parameter.py:110: assert self.data.shape =="
    " loaded_weight.shape",
    checks_shapes=True,
    launch=sglang_launch.launch,
)
