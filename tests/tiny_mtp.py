"""Builders of tiny MTP layers, in folders of their own or inside a target's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny import Stored, store, write_tensors


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
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n")
    write_tensors(folder, tensors, metadata={"format": "pt"})
    return folder
