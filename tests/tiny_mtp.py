"""Builders of tiny MTP layers, in folders of their own or inside a target's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tiny import Stored, store, write_tensors


def tiny_mimo_mtp(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = 96,
    tables: bool = True,
    inside_target: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny MTP layer of MiMo: config.json and weights.

    Args:
        folder: created; its parent must exist.
        tables: with the target's embedding and head.
        inside_target: with a decoder layer and the final norm of the target besides.
        dtype: "BF16", "F16" or "F32", of every weight.
        config: overrides of config.json.
    """
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> Stored:
        return store(rng.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5, dtype)

    def norm() -> Stored:
        return store(1 + 0.1 * rng.standard_normal(hidden, dtype=np.float32), dtype)

    def decoder_layer(prefix: str) -> dict[str, Stored]:
        queries, keys = heads * head_dim, kv_heads * head_dim
        return {
            f"{prefix}self_attn.q_proj.weight": weight(queries, hidden),
            f"{prefix}self_attn.k_proj.weight": weight(keys, hidden),
            f"{prefix}self_attn.v_proj.weight": weight(keys, hidden),
            f"{prefix}self_attn.o_proj.weight": weight(hidden, queries),
            f"{prefix}self_attn.q_proj.bias": weight(queries),
            f"{prefix}self_attn.k_proj.bias": weight(keys),
            f"{prefix}self_attn.v_proj.bias": weight(keys),
            f"{prefix}mlp.gate_proj.weight": weight(intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": weight(intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": weight(hidden, intermediate),
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}post_attention_layernorm.weight": norm(),
        }

    mtp = "model.mtp_layers.0."
    tensors = decoder_layer(mtp) | {
        f"{mtp}input_proj.weight": weight(hidden, 2 * hidden),
        f"{mtp}token_layernorm.weight": norm(),
        f"{mtp}hidden_layernorm.weight": norm(),
        f"{mtp}final_layernorm.weight": norm(),
    }
    if tables or inside_target:
        tensors["model.embed_tokens.weight"] = weight(vocab, hidden)
        tensors["lm_head.weight"] = weight(vocab, hidden)
    if inside_target:
        tensors |= decoder_layer("model.layers.0.") | {"model.norm.weight": norm()}
    keys = {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 2048,
        "model_type": "mimo",
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 640000.0,
        "tie_word_embeddings": False,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
        "use_sliding_window": False,
        "vocab_size": vocab,
        **(config or {}),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    write_tensors(folder, tensors, metadata={"format": "pt"})
    return folder


def tiny_deepseek_mtp(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    vocab: int = 96,
    experts: int = 4,
    moe_intermediate: int = 32,
    number: int = 3,
    modules: int = 1,
    tables: bool = True,
    inside_target: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny MTP layer of DeepSeek-V3, latent attention and experts: config.json and weights.

    Args:
        folder: created; its parent must exist.
        experts: routed ones, in two groups; 0 = one MLP.
        number: of the layer among the target's.
        modules: layers of this kind, one behind the other.
        tables: with its copies of the embedding and the head.
        inside_target: with an embedding and the final norm of the target besides, in two shards.
        dtype: of every weight but e_score_correction_bias.
        config: overrides of config.json.
    """
    write = _Layer(seed, hidden, dtype)
    q_rank, kv_rank, nope, rope, value = 96, 32, 16, 8, 16
    tensors: dict[str, Stored] = {}
    for own in (f"model.layers.{number + i}." for i in range(modules)):
        attention = f"{own}self_attn."
        tensors |= {
            f"{attention}q_a_proj.weight": write.weight(q_rank, hidden),
            f"{attention}q_a_layernorm.weight": write.norm(q_rank),
            f"{attention}q_b_proj.weight": write.weight(heads * (nope + rope), q_rank),
            f"{attention}kv_a_proj_with_mqa.weight": write.weight(kv_rank + rope, hidden),
            f"{attention}kv_a_layernorm.weight": write.norm(kv_rank),
            f"{attention}kv_b_proj.weight": write.weight(heads * (nope + value), kv_rank),
            f"{attention}o_proj.weight": write.weight(hidden, heads * value),
            **write.nextn(own, intermediate, experts, moe_intermediate),
        }
        if tables:
            tensors[f"{own}embed_tokens.weight"] = write.weight(vocab, hidden)
            tensors[f"{own}shared_head.head.weight"] = write.weight(vocab, hidden)
    if inside_target:
        tensors |= {
            "model.embed_tokens.weight": write.weight(vocab, hidden),
            "model.norm.weight": write.norm(hidden),
        }
    keys = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": heads,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "first_k_dense_replace": 1 if experts else number + 1,
        "moe_layer_freq": 1,
        "rope_theta": 10000.0,
        **_mixture_keys(experts, moe_intermediate),
        **_common_keys(hidden, intermediate, heads, number, vocab, dtype),
        "num_nextn_predict_layers": modules,
        **(config or {}),
    }
    _publish(folder, keys, tensors, sharded=inside_target)
    return folder


def tiny_glm4_moe_mtp(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = 96,
    experts: int = 4,
    moe_intermediate: int = 32,
    number: int = 3,
    modules: int = 1,
    tables: bool = True,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny MTP layer of GLM-4.x, biases, head norms and experts: config.json and weights.

    Args: see `tiny_deepseek_mtp`.
    """
    write = _Layer(seed, hidden, dtype)
    queries, keys_width = heads * head_dim, kv_heads * head_dim
    tensors: dict[str, Stored] = {}
    for own in (f"model.layers.{number + i}." for i in range(modules)):
        attention = f"{own}self_attn."
        tensors |= {
            f"{attention}q_proj.weight": write.weight(queries, hidden),
            f"{attention}k_proj.weight": write.weight(keys_width, hidden),
            f"{attention}v_proj.weight": write.weight(keys_width, hidden),
            f"{attention}o_proj.weight": write.weight(hidden, queries),
            f"{attention}q_proj.bias": write.weight(queries),
            f"{attention}k_proj.bias": write.weight(keys_width),
            f"{attention}v_proj.bias": write.weight(keys_width),
            f"{attention}q_norm.weight": write.norm(head_dim),
            f"{attention}k_norm.weight": write.norm(head_dim),
            **write.nextn(own, intermediate, experts, moe_intermediate),
        }
        if tables:
            tensors[f"{own}embed_tokens.weight"] = write.weight(vocab, hidden)
            tensors[f"{own}shared_head.head.weight"] = write.weight(vocab, hidden)
    keys = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "rope_theta": 1000000.0,
        **_mixture_keys(experts, moe_intermediate),
        **_common_keys(hidden, intermediate, heads, number, vocab, dtype),
        "num_nextn_predict_layers": modules,
        **(config or {}),
    }
    _publish(folder, keys, tensors, sharded=False)
    return folder


def tiny_qwen3_next_mtp(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = 96,
    experts: int = 4,
    moe_intermediate: int = 32,
    tables: bool = True,
    inside_target: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny MTP layer of Qwen3-Next, or of Qwen3.5 without experts: config and weights.

    Args: see `tiny_deepseek_mtp`; `experts` 0 = one MLP, with Qwen3.5's nested config.json.
    """
    write = _Layer(seed, hidden, dtype)
    own, attention = "mtp.layers.0.", "mtp.layers.0.self_attn."
    hidden_norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    layer_norms = ("input_layernorm", "post_attention_layernorm")
    tensors = {
        **{f"mtp.{name}.weight": write.zero_centred(hidden) for name in hidden_norms},
        **{f"{own}{name}.weight": write.zero_centred(hidden) for name in layer_norms},
        "mtp.fc.weight": write.weight(hidden, 2 * hidden),
        f"{attention}q_proj.weight": write.weight(2 * heads * head_dim, hidden),
        f"{attention}k_proj.weight": write.weight(kv_heads * head_dim, hidden),
        f"{attention}v_proj.weight": write.weight(kv_heads * head_dim, hidden),
        f"{attention}o_proj.weight": write.weight(hidden, heads * head_dim),
        f"{attention}q_norm.weight": write.zero_centred(head_dim),
        f"{attention}k_norm.weight": write.zero_centred(head_dim),
    }
    if experts:
        tensors[f"{own}mlp.gate.weight"] = write.weight(experts, hidden)
        tensors[f"{own}mlp.shared_expert_gate.weight"] = write.weight(1, hidden)
        for i in range(experts):
            tensors |= write.mlp(f"{own}mlp.experts.{i}.", moe_intermediate)
        tensors |= write.mlp(f"{own}mlp.shared_expert.", 2 * moe_intermediate)
    else:
        tensors |= write.mlp(f"{own}mlp.", intermediate)
    root = "model." if experts else "model.language_model."
    if tables or inside_target:
        tensors[f"{root}embed_tokens.weight"] = write.weight(vocab, hidden)
        tensors["lm_head.weight"] = write.weight(vocab, hidden)
    if inside_target:
        tensors[f"{root}norm.weight"] = write.zero_centred(hidden)
    rope = {"rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    keys = {"head_dim": head_dim, "num_key_value_heads": kv_heads, "attention_bias": False}
    keys |= _common_keys(hidden, intermediate, heads, 4, vocab, dtype)
    del keys["num_nextn_predict_layers"]
    if experts:
        keys |= {
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
            **(config or {}),
        }
    else:
        section = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [1, 1, 0]}
        text = {
            "model_type": "qwen3_5_text",
            "attn_output_gate": True,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": {**rope, **section},
            **keys,
            **(config or {}),
        }
        keys = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": False,
        }
    _publish(folder, keys, tensors, sharded=inside_target)
    return folder


def tiny_step3p5_mtp(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = 96,
    number: int = 3,
    modules: int = 3,
    window: int = 4,
    tables: bool = True,
    inside_target: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write the tiny MTP modules of Step-3.5, named and declared as it was released.

    Args: see `tiny_deepseek_mtp`; `heads` of the modules, `window` in rows, `tables` the target's
        embedding: heads of their own they always have.
    """
    write = _Layer(seed, hidden, dtype)
    queries, keys_width = heads * head_dim, kv_heads * head_dim
    tensors: dict[str, Stored] = {}
    for own in (f"model.layers.{number + i}." for i in range(modules)):
        attention, head = f"{own}self_attn.", f"{own}transformer.shared_head."
        norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm")
        tensors |= {
            **{f"{own}{name}.weight": write.zero_centred(hidden) for name in norms},
            f"{own}eh_proj.weight": write.weight(hidden, 2 * hidden),
            f"{attention}q_proj.weight": write.weight(queries, hidden),
            f"{attention}k_proj.weight": write.weight(keys_width, hidden),
            f"{attention}v_proj.weight": write.weight(keys_width, hidden),
            f"{attention}o_proj.weight": write.weight(hidden, queries),
            f"{attention}g_proj.weight": write.weight(heads, hidden),
            f"{attention}q_norm.weight": write.zero_centred(head_dim),
            f"{attention}k_norm.weight": write.zero_centred(head_dim),
            **write.mlp(f"{own}mlp.", intermediate),
            f"{head}norm.weight": write.zero_centred(hidden),
            f"{head}output.weight": write.weight(vocab, hidden),
        }
    if tables:
        tensors["model.embed_tokens.weight"] = write.weight(vocab, hidden)
    if inside_target:
        tensors |= {"model.norm.weight": write.zero_centred(hidden)}
    layers = number + modules
    keys = {
        **_common_keys(hidden, intermediate, 2 * heads, number, vocab, dtype),
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "att_impl_type": "GQA",
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": heads,
            "num_attention_groups": kv_heads,
            "head_dim": head_dim,
        },
        "head_dim": head_dim,
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
        **(config or {}),
    }  # fmt: skip
    _publish(folder, keys, tensors, sharded=inside_target)
    return folder


class _Layer:
    """Random tensors of one dtype, and what the layers of DeepSeek and GLM have in common."""

    def __init__(self, seed: int, hidden: int, dtype: str) -> None:
        self.rng, self.hidden, self.dtype = np.random.default_rng(seed), hidden, dtype

    def weight(self, *shape: int) -> Stored:
        values = self.rng.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5
        return store(values, self.dtype)

    def norm(self, width: int) -> Stored:
        values = 1 + 0.1 * self.rng.standard_normal(width, dtype=np.float32)
        return store(values, self.dtype)

    def zero_centred(self, width: int) -> Stored:
        return store(0.1 * self.rng.standard_normal(width, dtype=np.float32), self.dtype)

    def mlp(self, prefix: str, inner: int) -> dict[str, Stored]:
        return {
            f"{prefix}gate_proj.weight": self.weight(inner, self.hidden),
            f"{prefix}up_proj.weight": self.weight(inner, self.hidden),
            f"{prefix}down_proj.weight": self.weight(self.hidden, inner),
        }

    def nextn(self, own: str, inner: int, experts: int, expert_inner: int) -> dict[str, Stored]:
        norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
        tensors = {f"{own}{name}.weight": self.norm(self.hidden) for name in norms}
        tensors[f"{own}post_attention_layernorm.weight"] = self.norm(self.hidden)
        tensors[f"{own}eh_proj.weight"] = self.weight(self.hidden, 2 * self.hidden)
        if not experts:
            return tensors | self.mlp(f"{own}mlp.", inner)
        tensors[f"{own}mlp.gate.weight"] = self.weight(experts, self.hidden)
        correction = 0.1 * self.rng.standard_normal(experts, dtype=np.float32)
        tensors[f"{own}mlp.gate.e_score_correction_bias"] = store(correction, "F32")
        for i in range(experts):
            tensors |= self.mlp(f"{own}mlp.experts.{i}.", expert_inner)
        return tensors | self.mlp(f"{own}mlp.shared_experts.", expert_inner)


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


def _common_keys(
    hidden: int, intermediate: int, heads: int, number: int, vocab: int, dtype: str
) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_hidden_layers": number,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
        "vocab_size": vocab,
    }


def _publish(
    folder: Path, keys: Mapping[str, Any], tensors: Mapping[str, Stored], *, sharded: bool
) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    write_tensors(folder, tensors, sharded=sharded, metadata={"format": "pt"})
