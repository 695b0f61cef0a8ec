"""SGLang 0.5.23."""

from .. import sglang_config as config
from .. import sglang_config as declarations
from .. import sglang_linears as cache_scales
from .. import sglang_linears as modules
from ..captured_layers import sglang_captures
from ..config_rules import NULL_BASE
from ..engine import ConfigRules, DeclarationRules, Engine, LinearRules, TensorRules
from ..sglang import cut_head
from ..sglang.launch import LAUNCH_NOTE, launch
from ..sglang.schemes import SCHEMES

ENGINE = Engine(
    name="sglang",
    version="0.5.23",
    evidence="loading was executed on a CPU with SGLang 0.5.23's own classes; no kernel was run",
    archs=("sm90", "sm100", "gfx942"),
    other_archs=("gfx950",),
    checked_archs=("sm80",),
    own=lambda traits: traits.sglang,
    config=ConfigRules(
        architectures=config.ORDINARY,
        architecture_problem=config.architecture_problem,
        plain=config.plain_config,
        problem=modules.config_problem,
        captures=lambda question: sglang_captures(question.config),
        fc_norm_keys=("fc_norm", "use_aux_norm"),
        null_errors={"rope_theta": NULL_BASE},
    ),
    declaration=DeclarationRules(
        methods=declarations.METHODS,
        aliases={
            "modelopt_fp8": "modelopt",
            "modelopt_fp4": "modelopt",
            "awq_marlin": "awq",
            "gptq_marlin": "gptq",
        },
        other_keys=("compression_config",),
        unknown_method="ValueError: Unknown quantization method: {}.",
        no_method="ValueError: Unknown quantization method: .",
        taken=declarations.taken,
        schemes=SCHEMES,
        exclude_rules=modules.EXCLUDE_RULES,
        no_target={
            "compressed-tensors": "ValueError: Unable to find matching target for {prefix} in the"
            " compressed-tensors config."
        },
    ),
    linears=LinearRules(
        modules=modules.modules,
        plain=modules.plain,
        problem=modules.module_problem,
        stored=modules.codes_in_floats,
        biases=config.biases,
    ),
    tensors=TensorRules(
        cache_scale=cache_scales.cache_scale,
        stranger=modules.stranger,
        later_norm="hidden_norm",
        embedding_rows="AssertionError: self.org_vocab_size={vocab}"
        " self.use_presharded_weights=False loaded_weight.shape[output_dim]={rows}",
        absent_tables={
            table: f"{table} is not stored, so SGLang serves the target's"
            for table in ("embed_tokens", "lm_head")
        },
        unshared_head=config.unshared_head,
        cut_head=cut_head.cut_head,
        checks_shapes=True,
        scale_shape="AssertionError: sglang/srt/layers/parameter.py:110: assert self.data.shape =="
        " loaded_weight.shape",
    ),
    launch=launch,
    launch_note=LAUNCH_NOTE,
)
