"""Builder of tiny EAGLE-3 MLA drafts, in TorchSpec's and in ModelOpt's form; see tiny.py."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tiny import Stored, store, write_tensors

MODELOPT_EXTRAS: dict[str, Any] = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "head_dim": None,
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
"""Keys that ModelOpt's export keeps from its template: a mixture of experts that is not there."""


def tiny_eagle3_mla(
    folder: Path,
    *,
    seed: int = 0,
    architecture: str = "Eagle3DeepseekV2ForCausalLM",
    hidden: int = 64,
    intermediate: int = 96,
    num_layers: int = 1,
    heads: int = 4,
    q_lora_rank: int = 48,
    kv_lora_rank: int = 136,
    qk_nope_head_dim: int = 24,
    qk_rope_head_dim: int = 16,
    v_head_dim: int = 32,
    vocab: int = 96,
    prefix: str = "midlayer.",
    sharded: bool = False,
    embed: bool = True,
    head: bool = True,
    pruned_vocabulary: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_output: bool = False,
    modelopt: bool = False,
    dtype: str = "BF16",
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny EAGLE-3 MLA draft: config.json, weights and two tokenizer files.

    Like the published 576 (512 + 64), the rows of kv_a_proj_with_mqa are 152 (136 + 16): more than
    128, a multiple of 8 and not of 128.

    Args:
        folder: created; its parent must exist.
        prefix: of layer 0 ("midlayer.", "layers.0.", "model.layers.0."). Layers after it are
            "layers.1." and so on. With a "model." prefix, fc, norm and embed_tokens have it too.
        sharded: two shards and an index.
        embed: with embed_tokens. head: with lm_head.
        pruned_vocabulary: half of the vocabulary, with d2t and t2d.
        fc_norm, norm_before_fc, norm_output: options of EAGLE-3.1, with the norms they need.
        modelopt: as ModelOpt exports: "layers.0.*", no embed_tokens, no `draft_vocab_size`, the
            keys of a mixture of experts, d2t without t2d.
        dtype: "BF16", "F16" or "F32", of every weight.
        metadata: `__metadata__` of every file, {"format": "pt"} if not given.
        config: overrides of config.json.
    """
    if modelopt:
        prefix, embed = "layers.0.", False
    rng = np.random.default_rng(seed)
    draft_vocab = vocab // 2 if pruned_vocabulary else vocab
    keys: dict[str, Any] = {
        "architectures": [architecture],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "kv_lora_rank": kv_lora_rank,
        "model_type": "kimi_k2",
        "num_attention_heads": heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": heads,
        "q_lora_rank": q_lora_rank,
        "qk_nope_head_dim": qk_nope_head_dim,
        "qk_rope_head_dim": qk_rope_head_dim,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
        "v_head_dim": v_head_dim,
        "vocab_size": vocab,
    }
    keys |= MODELOPT_EXTRAS if modelopt else {"draft_vocab_size": draft_vocab}
    options = {"fc_norm": fc_norm, "norm_before_fc": norm_before_fc, "norm_output": norm_output}
    keys |= {name: True for name, asked in options.items() if asked} | dict(config or {})
    outer = "model." if prefix.startswith("model.") else ""

    def weight(*shape: int) -> Stored:
        return store(rng.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5, dtype)

    def norm(width: int = hidden) -> Stored:
        return store(1 + 0.1 * rng.standard_normal(width, dtype=np.float32), dtype)

    tensors = {f"{outer}fc.weight": weight(hidden, 3 * hidden), f"{outer}norm.weight": norm()}
    if fc_norm:
        tensors |= {f"{outer}fc_norm.{i}.weight": norm() for i in range(3)}
    if norm_before_fc:
        tensors[f"{outer}input_norm.weight"] = norm(3 * hidden)
    if embed:
        tensors[f"{outer}embed_tokens.weight"] = weight(vocab, hidden)
    if head:
        tensors["lm_head.weight"] = weight(draft_vocab, hidden)
    if pruned_vocabulary:
        kept = np.sort(rng.permutation(vocab)[:draft_vocab])
        tensors["d2t"] = Stored("I64", (draft_vocab,), (kept - np.arange(draft_vocab)).tobytes())
        if not modelopt:
            tensors["t2d"] = Stored("BOOL", (vocab,), np.isin(np.arange(vocab), kept).tobytes())
    for i in range(num_layers):
        layer = prefix if i == 0 else f"{outer}layers.{i}."
        wide = 2 * hidden if i == 0 else hidden
        queries = heads * (qk_nope_head_dim + qk_rope_head_dim)
        keys_values = heads * (qk_nope_head_dim + v_head_dim)
        tensors |= {
            f"{layer}self_attn.q_a_proj.weight": weight(q_lora_rank, wide),
            f"{layer}self_attn.q_a_layernorm.weight": norm(q_lora_rank),
            f"{layer}self_attn.q_b_proj.weight": weight(queries, q_lora_rank),
            f"{layer}self_attn.kv_a_proj_with_mqa.weight": weight(
                kv_lora_rank + qk_rope_head_dim, wide
            ),
            f"{layer}self_attn.kv_a_layernorm.weight": norm(kv_lora_rank),
            f"{layer}self_attn.kv_b_proj.weight": weight(keys_values, kv_lora_rank),
            f"{layer}self_attn.o_proj.weight": weight(hidden, heads * v_head_dim),
            f"{layer}mlp.gate_proj.weight": weight(intermediate, hidden),
            f"{layer}mlp.up_proj.weight": weight(intermediate, hidden),
            f"{layer}mlp.down_proj.weight": weight(hidden, intermediate),
            f"{layer}input_layernorm.weight": norm(),
            f"{layer}post_attention_layernorm.weight": norm(),
        }
        if i == 0:
            tensors[f"{layer}hidden_norm.weight"] = norm()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n', encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}\n", encoding="utf-8")
    write_tensors(folder, tensors, sharded=sharded, metadata=metadata or {"format": "pt"})
    return folder
