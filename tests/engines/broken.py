"""Folders that other tools and hands make, each wrong in one way; and their right neighbours.

Each is a folder that draftquant wrote, with its config.json or tensors edited. Data only.
"""

from edits import (
    DOWN_PROJ,
    O_PROJ,
    Q_A_PROJ,
    QKV,
    SHARED,
    Broken,
    awq_per_channel,
    configure,
    declare,
    excludes,
    fc_quantized,
    global_scales,
    head_quantized,
    kept,
    kv_b_quantized,
    nested,
    pack_order,
    side_file_disagrees,
    side_file_only,
    stray_bias,
    without_config,
    without_method,
)

QUARK_FP8 = ("quark", "fp8-tensor", "fp8-static")
QUARK_INT4 = ("quark", "int4-group128", "weights-only")
CT_FP8 = ("compressed-tensors", "fp8-channel", "fp8-token")
CT_FP8_BLOCK = ("compressed-tensors", "fp8-block", "fp8-group")
CT_INT4 = ("compressed-tensors", "int4-group128", "weights-only")
MODELOPT_PTPC = ("modelopt", "fp8-channel", "fp8-token")
MODELOPT_FP8 = ("modelopt", "fp8-tensor", "fp8-static")
FP8 = ("fp8", "fp8-tensor", "fp8-static")
FP8_BLOCK = ("fp8", "fp8-block", "fp8-group")
QKV_ALONE = [f"re:.*[.]{part}_proj$" for part in "qkv"]
"""Without the dot, `.*v_proj$` would match qkv_proj as well."""
NVFP4 = ("modelopt", "nvfp4", "nvfp4")
NVFP4_WEIGHTS = ("modelopt", "nvfp4", "weights-only")
AWQ = ("awq", "int4-group128-float16", "weights-only")

BROKEN = (
    Broken(
        name="quark-exclude-bare",
        what="Quark's own spelling of the excludes: fc and lm_head without a prefix",
        formats=QUARK_FP8,
        edit=excludes(*SHARED),
    ),
    Broken(
        name="quark-exclude-star",
        what="excludes as wildcards, which Quark's layout has not",
        formats=QUARK_FP8,
        edit=excludes("*fc*", "*lm_head*", "*embed_tokens*"),
    ),
    Broken(
        name="quark-int4-exclude-bare",
        what="bare excludes again, with INT4 groups: fc's shape differs then",
        formats=QUARK_INT4,
        edit=excludes(*SHARED),
    ),
    Broken(
        name="quark-pack-label",
        what="pack_method says `order`, the bytes are `reorder`: loading cannot see it",
        formats=QUARK_INT4,
        edit=pack_order,
    ),
    Broken(
        name="ct-ignore-bare",
        what="ignore lists fc and lm_head without a prefix",
        formats=CT_FP8,
        edit=excludes(*SHARED),
    ),
    Broken(
        name="ct-int4-ignore-bare",
        what="bare ignores again, with INT4 groups",
        formats=CT_INT4,
        edit=excludes(*SHARED),
    ),
    Broken(
        name="modelopt-model-star",
        what="ModelOpt's own exclude of an EAGLE draft: model*",
        formats=MODELOPT_FP8,
        edit=excludes("model*", "lm_head*"),
    ),
    Broken(
        name="modelopt-regex",
        what="excludes as regular expressions, which ModelOpt's layout has not",
        formats=MODELOPT_FP8,
        edit=excludes("re:.*fc$", "re:.*lm_head$", "re:.*embed_tokens$"),
    ),
    Broken(
        name="modelopt-side-file-only",
        what="ModelOpt's own form: hf_quant_config.json, nothing in config.json",
        formats=MODELOPT_FP8,
        edit=side_file_only,
    ),
    Broken(
        name="modelopt-side-file-only-per-token",
        what="hf_quant_config.json alone again, with FP8 per channel and token",
        formats=MODELOPT_PTPC,
        edit=side_file_only,
    ),
    Broken(
        name="modelopt-side-file-only-weights",
        what="hf_quant_config.json alone again, with NVFP4 weights only",
        formats=NVFP4_WEIGHTS,
        edit=side_file_only,
    ),
    Broken(
        name="modelopt-nested",
        what="the nested form in config.json, as ModelOpt exports its own drafts: no quant_method",
        formats=MODELOPT_FP8,
        edit=nested,
    ),
    Broken(
        name="modelopt-nested-dflash",
        what="the nested form again, of a draft whose head no engine quantizes",
        formats=MODELOPT_FP8,
        edit=nested,
        family="dflash",
    ),
    Broken(
        name="modelopt-nested-nvfp4",
        what="the nested form again, with NVFP4",
        formats=NVFP4,
        edit=nested,
    ),
    Broken(
        name="modelopt-without-method",
        what="the flat form without quant_method",
        formats=MODELOPT_FP8,
        edit=without_method,
    ),
    Broken(
        name="modelopt-side-file-disagrees",
        what="hf_quant_config.json excludes nothing, config.json excludes fc and lm_head",
        formats=MODELOPT_FP8,
        edit=side_file_disagrees,
    ),
    Broken(
        name="fp8-ignored-star",
        what="ignored_layers with wildcards",
        formats=FP8,
        edit=excludes("*fc*", "*lm_head*"),
    ),
    Broken(
        name="fp8-ignored-bare",
        what="ignored_layers without a prefix",
        formats=FP8,
        edit=excludes(*SHARED),
    ),
    Broken(
        name="fp8-block-small-heads",
        what="blocks of 128 rows, and 64 rows of k and of v",
        formats=FP8_BLOCK,
        edit=lambda _folder: None,
        source={"kv_heads": 1},
    ),
    Broken(
        name="ct-fp8-block-small-heads",
        what="the same blocks, in compressed-tensors",
        formats=CT_FP8_BLOCK,
        edit=lambda _folder: None,
        source={"kv_heads": 1},
    ),
    Broken(
        name="fp8-block-split-inputs",
        what="blocks of 128 inputs, and 192 inputs of o_proj in each of two shards",
        formats=FP8_BLOCK,
        edit=lambda _folder: None,
        source={"v_head_dim": 96},
        family="eagle3-mla",
    ),
    Broken(
        name="ct-fp8-block-split-rows",
        what="blocks of 128 rows, and 192 rows of q_b_proj in each of two shards",
        formats=CT_FP8_BLOCK,
        edit=lambda _folder: None,
        source={"heads": 2},
        family="eagle3-mla",
    ),
    Broken(
        name="nvfp4-global-scale-shared",
        what="NVFP4 with one weight_scale_2 for q, k and v: right",
        formats=NVFP4,
        edit=global_scales(1.0, 1.0, 1.0),
    ),
    Broken(
        name="nvfp4-global-scales-differ",
        what="NVFP4 with another weight_scale_2 for k than for q and v",
        formats=NVFP4,
        edit=global_scales(1.0, 0.5, 1.0),
    ),
    Broken(
        name="awq-bfloat16",
        what="AWQ on a draft that is served in BF16",
        formats=AWQ,
        edit=lambda _folder: None,
    ),
    Broken(
        name="awq-nothing-excluded",
        what="modules_to_not_convert is missing",
        formats=AWQ,
        edit=lambda folder: folder.quantization.pop("modules_to_not_convert"),
        source={"dtype": "F16"},
    ),
    Broken(
        name="awq-per-channel",
        what="group_size -1: one group for the whole row",
        formats=AWQ,
        edit=awq_per_channel,
        source={"dtype": "F16"},
    ),
    Broken(
        name="o-proj-kept-regex",
        what="o_proj in BF16, ignored by its last part: right",
        formats=CT_INT4,
        edit=kept(O_PROJ, exclude=["re:.*o_proj$"]),
    ),
    Broken(
        name="o-proj-kept-name-on-disk",
        what="o_proj in BF16, ignored by its name on disk",
        formats=CT_INT4,
        edit=kept(O_PROJ, exclude=[O_PROJ]),
    ),
    Broken(
        name="o-proj-kept-layer-index",
        what="o_proj in BF16, ignored as layer 0",
        formats=CT_FP8,
        edit=kept(O_PROJ, exclude=["layers.0.self_attn.o_proj", "model.layers.0.self_attn.o_proj"]),
    ),
    Broken(
        name="o-proj-kept-modelopt",
        what="o_proj in BF16, excluded as *o_proj*: right",
        formats=MODELOPT_FP8,
        edit=kept(O_PROJ, exclude=["*o_proj*"]),
    ),
    Broken(
        name="qkv-kept-without-alias",
        what="q, k and v in BF16, ignored by their own names, not as qkv_proj",
        formats=CT_FP8,
        edit=kept(*QKV, exclude=QKV_ALONE),
    ),
    Broken(
        name="qkv-kept-with-alias",
        what="q, k and v in BF16, ignored by their own names and as qkv_proj",
        formats=CT_FP8,
        edit=kept(*QKV, exclude=[*QKV_ALONE, "re:.*[.]qkv_proj$"]),
    ),
    Broken(
        name="qkv-kept-quark-without-alias",
        what="the same in Quark's layout, without qkv_proj",
        formats=QUARK_FP8,
        edit=kept(*QKV, exclude=QKV_ALONE),
    ),
    Broken(
        name="q-proj-alone-kept",
        what="q_proj in BF16, k_proj and v_proj quantized: they are fused",
        formats=CT_FP8,
        edit=kept(QKV[0], exclude=["re:.*q_proj$"]),
    ),
    Broken(
        name="weight-scale-missing",
        what="down_proj has no weight_scale",
        formats=CT_FP8,
        edit=lambda folder: folder.drop(f"{DOWN_PROJ}.weight_scale"),
    ),
    Broken(
        name="input-scale-missing",
        what="o_proj has no input_scale",
        formats=MODELOPT_FP8,
        edit=lambda folder: folder.drop(f"{O_PROJ}.input_scale"),
    ),
    Broken(
        name="linear-missing",
        what="down_proj is not there at all",
        formats=CT_FP8,
        edit=lambda folder: folder.drop(DOWN_PROJ),
    ),
    Broken(
        name="stray-bias",
        what="down_proj has a bias, which no engine asks for",
        formats=CT_FP8,
        edit=stray_bias,
    ),
    Broken(
        name="quant-method-missing",
        what="quantization_config without quant_method",
        formats=CT_FP8,
        edit=lambda folder: folder.quantization.pop("quant_method"),
    ),
    Broken(
        name="quant-method-unknown",
        what="a quant_method that nobody has",
        formats=CT_FP8,
        edit=declare("quant_method", "draftquant"),
    ),
    Broken(
        name="int4-without-config",
        what="packed INT4 (compressed-tensors) without quantization_config",
        formats=CT_INT4,
        edit=without_config,
    ),
    Broken(
        name="awq-without-config",
        what="packed INT4 (AWQ) without quantization_config",
        formats=AWQ,
        edit=without_config,
        source={"dtype": "F16"},
    ),
    Broken(
        name="fp8-without-config",
        what="FP8 with scales, without quantization_config",
        formats=CT_FP8,
        edit=without_config,
    ),
    Broken(
        name="draft-vocab-size-missing",
        what="half of the vocabulary with d2t, and no draft_vocab_size",
        formats=CT_FP8,
        edit=lambda folder: folder.config.pop("draft_vocab_size"),
    ),
    Broken(
        name="architecture-of-tensorrt-llm",
        what="the architecture that TensorRT-LLM calls it",
        formats=CT_FP8,
        edit=configure("architectures", ["EAGLE3LlamaForCausalLM"]),
    ),
    Broken(
        name="fc-quantized",
        what="fc is quantized as well, and not ignored",
        formats=CT_FP8,
        edit=fc_quantized,
    ),
    Broken(
        name="head-quantized",
        what="lm_head is quantized as well, and not ignored",
        formats=CT_FP8,
        edit=head_quantized,
    ),
    Broken(
        name="group-splits-shard",
        what="384 inputs of down_proj in groups of 128: not whole groups in two shards",
        formats=CT_INT4,
        edit=lambda _folder: None,
        source={"intermediate": 384},
    ),
    Broken(
        name="kv-head-in-each-shard",
        what="one head of k and of v, which each of two shards has whole: right",
        formats=CT_FP8,
        edit=lambda _folder: None,
        source={"kv_heads": 1},
    ),
    Broken(
        name="vocabulary-padded",
        what="a draft vocabulary of 150 tokens, for which engines build 192 rows: right",
        formats=CT_FP8,
        edit=lambda _folder: None,
        source={"vocab": 300},
    ),
    Broken(
        name="mla-kv-b-quantized",
        what="kv_b_proj is quantized as well, and not ignored",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=kv_b_quantized,
    ),
    Broken(
        name="mla-model-type",
        what="model_type deepseek_v3 where the draft has kimi_k2",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=configure("model_type", "deepseek_v3"),
    ),
    Broken(
        name="mla-q-a-alone-kept",
        what="q_a_proj in BF16, kv_a_proj_with_mqa quantized: they are fused",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=kept(Q_A_PROJ, exclude=["re:.*q_a_proj$"]),
    ),
    Broken(
        name="mla-quark-exclude-bare",
        what="bare excludes, kv_b_proj among them",
        formats=QUARK_FP8,
        family="eagle3-mla",
        edit=excludes(*SHARED, "kv_b_proj"),
    ),
    Broken(
        name="dflash-quark-exclude-bare",
        what="bare excludes: fc without a prefix",
        formats=QUARK_FP8,
        family="dflash",
        edit=excludes(*SHARED),
    ),
    Broken(
        name="dflash-o-proj-kept-layer-index",
        what="o_proj of layer 1 in BF16, ignored by its index",
        formats=CT_FP8,
        family="dflash",
        edit=kept("layers.1.self_attn.o_proj", exclude=["layers.1.self_attn.o_proj"]),
    ),
    Broken(
        name="dflash-o-proj-kept-modelopt",
        what="o_proj of layer 1 in BF16, excluded by its index in ModelOpt's layout",
        formats=MODELOPT_FP8,
        family="dflash",
        edit=kept("layers.1.self_attn.o_proj", exclude=["layers.1.self_attn.o_proj"]),
    ),
)
