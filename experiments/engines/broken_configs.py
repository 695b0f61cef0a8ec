"""Folders whose config.json says what other tools say: names, speculators, keys left out."""

from config_edits import (
    add_head_norms,
    as_fnuz,
    both,
    named,
    plain_norms,
    quantized,
    speculators,
    without_key,
)
from edits import KV_B_PROJ, QKV, Broken, configure, excludes, kept, unquantized

CT_FP8 = ("compressed-tensors", "fp8-channel", "fp8-token")
FC_NORMS = tuple(f"fc_norm.{i}" for i in range(3))
CT_INT4 = ("compressed-tensors", "int4-group128", "weights-only")

CONFIGS = (
    Broken(
        name="architecture-of-llama",
        what="the architecture of a whole Llama model",
        formats=CT_FP8,
        edit=named("LlamaForCausalLM"),
    ),
    Broken(
        name="architecture-of-llama-unpruned",
        what="the architecture of a whole Llama model, and the whole vocabulary",
        formats=CT_FP8,
        edit=named("LlamaForCausalLM"),
        source={"pruned_vocabulary": False},
    ),
    Broken(
        name="architecture-eagle3-llama",
        what="the architecture as AngelSlim calls it: Eagle3LlamaForCausalLM",
        formats=CT_FP8,
        edit=named("Eagle3LlamaForCausalLM"),
    ),
    Broken(
        name="architecture-qwen3-eagle3",
        what="Qwen3ForCausalLMEagle3, a name that no engine has",
        formats=CT_FP8,
        edit=named("Qwen3ForCausalLMEagle3"),
    ),
    Broken(
        name="qwen3",
        what="Eagle3Qwen3ForCausalLM, with normed queries and keys",
        formats=CT_FP8,
        edit=named("Eagle3Qwen3ForCausalLM", normed_heads=True, model_type="qwen3"),
    ),
    Broken(
        name="qwen3-ordinary",
        what="the architecture of a whole Qwen3 model, with normed queries and keys",
        formats=CT_FP8,
        edit=named("Qwen3ForCausalLM", normed_heads=True, model_type="qwen3"),
    ),
    Broken(
        name="qwen3-without-norms",
        what="Eagle3Qwen3ForCausalLM, and no norms of queries and keys",
        formats=CT_FP8,
        edit=named("Eagle3Qwen3ForCausalLM"),
    ),
    Broken(
        name="qwen3-qkv-kept",
        what="q, k and v of Qwen3 in BF16, ignored by their own names and as qkv_proj",
        formats=CT_FP8,
        edit=both(
            kept(*QKV, exclude=["re:.*[.][qkv]_proj$", "re:.*[.]qkv_proj$"]),
            named("Eagle3Qwen3ForCausalLM", normed_heads=True),
        ),
    ),
    Broken(
        name="norms-of-heads",
        what="a Llama draft with the norms of queries and keys of Qwen3",
        formats=CT_FP8,
        edit=named("LlamaForCausalLMEagle3", normed_heads=True),
    ),
    Broken(
        name="mla-architecture-v3",
        what="Eagle3DeepseekV3ForCausalLM",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=named("Eagle3DeepseekV3ForCausalLM"),
    ),
    Broken(
        name="mla-architecture-of-deepseek-v3",
        what="the architecture of a whole DeepSeek-V3 model",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=named("DeepseekV3ForCausalLM"),
    ),
    Broken(
        name="mla-architecture-of-deepseek-v2",
        what="the architecture of a whole DeepSeek-V2 model",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=named("DeepseekV2ForCausalLM"),
    ),
    Broken(
        name="mla-architecture-eagle3",
        what="DeepseekV3ForCausalLMEagle3, a name that no engine has",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=named("DeepseekV3ForCausalLMEagle3"),
    ),
    Broken(
        name="dflash-architecture-qwen3",
        what="DFlashQwen3ForCausalLM, vLLM's name of the class",
        formats=CT_FP8,
        family="dflash",
        edit=named("DFlashQwen3ForCausalLM"),
    ),
    Broken(
        name="speculators", what="the layout of speculators", formats=CT_FP8, edit=speculators()
    ),
    Broken(
        name="speculators-declared-inside",
        what="the layout of speculators, the declaration beside the keys of the layers",
        formats=CT_INT4,
        edit=speculators(inside=True),
    ),
    Broken(
        name="speculators-qwen3",
        what="the layout of speculators with layers of Qwen3",
        formats=CT_FP8,
        edit=both(add_head_norms, speculators("qwen3")),
    ),
    Broken(
        name="speculators-plain",
        what="the layout of speculators, not quantized",
        formats=CT_FP8,
        edit=both(unquantized, speculators()),
    ),
    Broken(
        name="speculators-mistral",
        what="the layout of speculators with layers of Mistral",
        formats=CT_FP8,
        edit=speculators("mistral"),
    ),
    Broken(
        name="speculators-without-config",
        what="the layout of speculators without speculators_config",
        formats=CT_FP8,
        edit=speculators(without="speculators_config"),
    ),
    Broken(
        name="speculators-without-activation",
        what="the layout of speculators without hidden_act",
        formats=CT_FP8,
        edit=speculators(without="hidden_act"),
    ),
    Broken(
        name="speculators-dflash",
        what="the layout of speculators",
        formats=CT_FP8,
        family="dflash",
        edit=speculators("qwen3"),
    ),
    Broken(
        name="speculators-dflash-without-positions",
        what="the layout of speculators without max_position_embeddings",
        formats=CT_FP8,
        family="dflash",
        edit=speculators("qwen3", without="max_position_embeddings"),
    ),
    Broken(
        name="speculators-dflash-without-mask",
        what="the layout of speculators without mask_token_id",
        formats=CT_FP8,
        family="dflash",
        edit=speculators("qwen3", without="mask_token_id"),
    ),
    Broken(
        name="model-type-missing",
        what="config.json without model_type",
        formats=CT_FP8,
        edit=without_key("model_type"),
    ),
    Broken(
        name="rope-missing",
        what="config.json without rope_theta",
        formats=CT_FP8,
        edit=without_key("rope_theta"),
    ),
    Broken(
        name="mla-ignore-default",
        what="compressed-tensors' own ignore list: lm_head, though fc and kv_b_proj are in BF16",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=excludes("lm_head"),
    ),
    Broken(
        name="mla-ignore-default-all",
        what="the same list, and all the rest is quantized",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=both(quantized("fc", KV_B_PROJ), excludes("lm_head")),
    ),
    Broken(
        name="mla-ignore-names-on-disk",
        what="ignores as a tool lists them: the modules in BF16, by their names on disk",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=excludes("lm_head", "fc", KV_B_PROJ),
    ),
    Broken(
        name="mla-ignored-and-quantized",
        what="q_a_proj and kv_a_proj_with_mqa are ignored, and stored as codes",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=excludes(
            "re:.*q_a_proj$", "re:.*kv_a_proj_with_mqa$", "re:.*kv_b_proj$", "re:.*fc$", "lm_head"
        ),
    ),
    Broken(
        name="embedding-quantized",
        what="the embedding is stored as FP8 codes, with scales",
        formats=CT_FP8,
        edit=quantized("embed_tokens"),
    ),
    Broken(
        name="embedding-without-scales",
        what="the embedding is stored as FP8 codes, without scales",
        formats=CT_FP8,
        edit=both(quantized("embed_tokens"), lambda f: f.drop("embed_tokens.weight_scale")),
    ),
    Broken(
        name="eagle31",
        what="EAGLE-3.1: norms before fc, one for each feature",
        formats=CT_FP8,
        edit=both(plain_norms(*FC_NORMS), configure("fc_norm", True)),
    ),
    Broken(
        name="eagle31-without-flag",
        what="EAGLE-3.1 without fc_norm in config.json",
        formats=CT_FP8,
        edit=plain_norms(*FC_NORMS),
    ),
    Broken(
        name="eagle31-old-names",
        what="EAGLE-3.1 with the older names of its norms",
        formats=CT_FP8,
        edit=both(
            plain_norms("aux_norm_low", "aux_norm_mid", "aux_norm_high"), configure("fc_norm", True)
        ),
    ),
    Broken(
        name="norm-before-fc",
        what="one norm before fc, over all features",
        formats=CT_FP8,
        edit=both(plain_norms("input_norm", width=3), configure("norm_before_fc", True)),
    ),
    Broken(
        name="norm-before-fc-without-flag",
        what="one norm before fc, without norm_before_fc in config.json",
        formats=CT_FP8,
        edit=plain_norms("input_norm", width=3),
    ),
    Broken(
        name="mla-eagle31",
        what="EAGLE-3.1: norms before fc, one for each feature",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=both(plain_norms(*FC_NORMS), configure("fc_norm", True)),
    ),
    Broken(
        name="mla-norm-before-fc",
        what="one norm before fc, over all features, which no engine has for MLA",
        formats=CT_FP8,
        family="eagle3-mla",
        edit=both(plain_norms("input_norm", width=3), configure("norm_before_fc", True)),
    ),
    Broken(
        name="fp8-fnuz",
        what="FP8 codes of the FNUZ kind, which engines copy by value: right",
        formats=CT_FP8,
        edit=as_fnuz,
    ),
)
