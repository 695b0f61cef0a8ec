"""Builders of tiny MTP layers, in folders of their own or inside a target's.

Arguments beside those of each: see `tiny.tiny_eagle3_llama` (`dtype` of every weight but
e_score_correction_bias), and

    tables: with the target's embedding and head, or copies of these.
    inside_target: with something of the target besides, in two shards.
    number: of the layer among the target's.
    modules: layers of this kind, one behind the other.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draft_shapes as shapes
from draft_shapes import Shapes, named
from tiny import Drawn, optional, publish, size_keys


def tiny_mimo_mtp(
    folder: Path,
    *,
    seed: int = 0,
    tables: bool = True,
    inside_target: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write a tiny MTP layer of MiMo; inside a target with a decoder layer and the final norm."""
    keys = _keys(1, dtype, sizes) | {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "model_type": "mimo",
        "rope_theta": 640000.0,
        "use_sliding_window": False,
    }
    hidden, mtp = keys["hidden_size"], "model.mtp_layers.0."
    layer = shapes.attention(keys, hidden, biased=True) | shapes.mlp(keys)
    own: Shapes = {"input_proj": (hidden, 2 * hidden)}
    own |= {f"{name}_layernorm": (hidden,) for name in ("token", "hidden", "final")}
    found = named(mtp, layer | own)
    if tables or inside_target:
        found |= shapes.tables(keys, ("embed_tokens", "lm_head"), "model.")
    if inside_target:
        found |= named("model.layers.0.", layer) | {"model.norm.weight": (hidden,)}
    return _publish(folder, keys, config, Drawn(seed, dtype).tensors(found))


def tiny_deepseek_mtp(
    folder: Path,
    *,
    seed: int = 0,
    experts: int = 4,
    moe_intermediate: int = 32,
    number: int = 3,
    modules: int = 1,
    tables: bool = True,
    inside_target: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write tiny MTP layers of DeepSeek-V3: latent attention, experts (0 = one MLP)."""
    keys = _keys(number, dtype, sizes) | _mixture_keys(experts, moe_intermediate)
    del keys["head_dim"]
    keys |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": keys["num_attention_heads"],
        "q_lora_rank": 96,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1 if experts else number + 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": modules,
    }
    attention = shapes.latent_attention(keys, keys["hidden_size"])
    found = _nextn(keys, attention, experts, number, tables=tables)
    if inside_target:
        found |= shapes.tables(keys, ("embed_tokens",), "model.")
        found["model.norm.weight"] = (keys["hidden_size"],)
    tensors = Drawn(seed, dtype).tensors(found)
    return _publish(folder, keys, config, tensors, sharded=inside_target)


def tiny_glm4_moe_mtp(
    folder: Path,
    *,
    seed: int = 0,
    experts: int = 4,
    moe_intermediate: int = 32,
    number: int = 3,
    modules: int = 1,
    tables: bool = True,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write tiny MTP layers of GLM-4.x: biases, head norms and experts (0 = one MLP)."""
    keys = _keys(number, dtype, sizes) | _mixture_keys(experts, moe_intermediate)
    keys |= {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "rope_theta": 1000000.0,
        "num_nextn_predict_layers": modules,
    }
    attention = shapes.attention(keys, keys["hidden_size"], biased=True, normed=True)
    found = _nextn(keys, attention, experts, number, tables=tables)
    return _publish(folder, keys, config, Drawn(seed, dtype).tensors(found))


def tiny_qwen3_next_mtp(
    folder: Path,
    *,
    seed: int = 0,
    experts: int = 4,
    moe_intermediate: int = 32,
    tables: bool = True,
    inside_target: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write a tiny MTP layer of Qwen3-Next; `experts` 0 = of Qwen3.5, with its nested config."""
    keys = _keys(4, dtype, sizes) | {"attention_bias": False}
    del keys["num_nextn_predict_layers"], keys["rope_theta"]
    rope = {"rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    mixture = {
        **rope,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": moe_intermediate,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 2 * moe_intermediate,
    }
    section = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    dense = {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {**rope, **section},
    }
    keys |= mixture if experts else dense
    root = "model." if experts else "model.language_model."
    found = shapes.qwen3_next_mtp(keys, experts)
    if tables or inside_target:
        found |= shapes.tables(keys, ("embed_tokens", "lm_head"), root)
    if inside_target:
        found[f"{root}norm.weight"] = (keys["hidden_size"],)
    tensors = Drawn(seed, dtype).tensors(found, around=0)
    if experts:
        return _publish(folder, keys, config, tensors, sharded=inside_target)
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**keys, **(config or {})},
        "tie_word_embeddings": False,
    }
    return _publish(folder, outer, None, tensors, sharded=inside_target)


def tiny_step3p5_mtp(
    folder: Path,
    *,
    seed: int = 0,
    number: int = 3,
    modules: int = 3,
    window: int = 4,
    tables: bool = True,
    inside_target: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write the tiny MTP modules of Step-3.5, named and declared as it was released.

    `heads` of the modules, `window` in rows, `tables` the target's embedding: heads of their own
    they always have.
    """
    keys, layers = _keys(number, dtype, sizes), number + modules
    heads, kv_heads = keys["num_attention_heads"], keys.pop("num_key_value_heads")
    keys |= {
        "num_attention_heads": 2 * heads,
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "att_impl_type": "GQA",
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": heads,
            "num_attention_groups": kv_heads,
            "head_dim": keys["head_dim"],
        },
        "layer_types": ["full_attention", *["sliding_attention"] * (layers - 1)],
        "moe_layers_enum": "1,2",
        "num_attention_groups": kv_heads,
        "num_nextn_predict_layers": modules,
        "partial_rotary_factors": [0.5] + [1.0] * (layers - 1),
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 32.0, "original_max_position_embeddings": 1024},
        "rope_theta": [5000000.0] + [10000.0] * (layers - 1),
        "sliding_window": window,
        "swiglu_limits": [0.0] * layers,
        "swiglu_limits_shared": [0.0] * (number - 1) + [16.0] + [0.0] * modules,
        "use_head_wise_attn_gate": True,
        "use_rope_layers": [],
        "yarn_only_types": ["full_attention"],
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "norm_expert_weight": True,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 3.0,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
    }  # fmt: skip
    found = shapes.step3p5_mtp(keys, number, modules)
    if tables:
        found |= shapes.tables(keys, ("embed_tokens",), "model.")
    if inside_target:
        found["model.norm.weight"] = (keys["hidden_size"],)
    tensors = Drawn(seed, dtype).tensors(found, around=0)
    return _publish(folder, keys, config, tensors, sharded=inside_target)


def _nextn(
    keys: Mapping[str, Any], attention: Shapes, experts: int, number: int, *, tables: bool
) -> Shapes:
    """All modules, each with its copies of the tables."""
    names, found = optional(embed_tokens=tables, lm_head=tables), Shapes()
    renamed = {"embed_tokens.weight": "embed_tokens", "lm_head.weight": "shared_head.head"}
    copies = {renamed[name]: shape for name, shape in shapes.tables(keys, names).items()}
    layer = shapes.nextn(keys, attention, experts) | copies
    for i in range(keys["num_nextn_predict_layers"]):
        found |= named(f"model.layers.{number + i}.", layer)
    return found


def _mixture_keys(experts: int, inner: int) -> dict[str, Any]:
    return {
        "n_routed_experts": experts or 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _keys(number: int, dtype: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    return size_keys(dtype=dtype, num_layers=number, **sizes) | {
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
    }


def _publish(
    folder: Path,
    keys: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    tensors: Any,
    *,
    sharded: bool = False,
) -> Path:
    whole = {**keys, **(config or {})}
    return publish(folder, whole, tensors, sharded=sharded, tokenizer=False)
