"""Builder of tiny DFlash drafts in all spellings, with their side files; see tiny.py."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tiny import Stored, store, write_tensors

Kind = Literal["dflash", "dflash2"]
Spelling = Literal["z-lab", "model", "draft_model", "dflash_module", "encoder", "torchspec"]
_OUTER = {"model": "model.", "draft_model": "draft_model.", "dflash_module": "dflash_module."}
_RENAMED = {
    "encoder": {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"},
    "torchspec": {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"},
}
MASK_TOKEN_ID = 95
OWN_KEYS: Mapping[Kind, Mapping[str, Any]] = {
    "dflash": {},
    "dflash2": {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 24,
        "selector_top_k": 8,
    },
}
"""What stands in dflash_config besides the keys of DFlash."""
_ARCHITECTURES: Mapping[Kind, str] = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
README = "# A tiny draft\n\nCafé, 草稿: bytes that must travel unchanged.\r\n"


def tiny_dflash(
    folder: Path,
    *,
    kind: Kind = "dflash",
    seed: int = 0,
    spelling: Spelling = "z-lab",
    hidden: int = 64,
    intermediate: int = 96,
    num_layers: int = 5,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 96,
    block_size: int = 8,
    sharded: bool = False,
    embed: bool = False,
    head: bool = False,
    pruned_vocabulary: bool = False,
    mask_embedding: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny DFlash draft: config.json, weights and side files.

    Like the published drafts it has neither embedding nor head, and queries wider than the draft.

    Args:
        folder: created; its parent must exist.
        kind: DFlash, or what has its layers and more.
        spelling: of tensor names; "torchspec" has a flat config.json as well.
        sharded: two shards and an index.
        embed: with embed_tokens. head: with lm_head, also where the vocabulary is pruned.
        pruned_vocabulary: half of the vocabulary, with a head, d2t and t2d.
        mask_embedding: with mask_embedding.pt.
        dtype: "BF16", "F16" or "F32", of every weight.
        config: overrides of config.json. own: of its dflash_config.
    """
    rng = np.random.default_rng(seed)
    draft_vocab = vocab // 2 if pruned_vocabulary else vocab
    nested = {
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": [1, 3, 5],
        **OWN_KEYS[kind],
        **(own or {}),
    }
    keys = {
        "architectures": [_ARCHITECTURES[kind]],
        "block_size": block_size,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layer_types": ["full_attention"] * num_layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        **({"draft_vocab_size": draft_vocab} if pruned_vocabulary else {}),
        **({"dflash_config": nested} if spelling != "torchspec" else nested),
        **({"model_type": "dflash", "num_target_layers": 3} if spelling == "torchspec" else {}),
        **(config or {}),
    }

    def weight(*shape: int) -> Stored:
        return store(rng.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5, dtype)

    def norm(width: int = hidden) -> Stored:
        return store(1 + 0.1 * rng.standard_normal(width, dtype=np.float32), dtype)

    tensors = {"fc.weight": weight(hidden, 3 * hidden), "hidden_norm.weight": norm()}
    tensors["norm.weight"] = norm()
    if embed:
        tensors["embed_tokens.weight"] = weight(vocab, hidden)
    if head or pruned_vocabulary:
        tensors["lm_head.weight"] = weight(draft_vocab, hidden)
    if pruned_vocabulary:
        kept = np.sort(rng.permutation(vocab)[:draft_vocab])
        tensors["d2t"] = Stored("I64", (draft_vocab,), (kept - np.arange(draft_vocab)).tobytes())
        tensors["t2d"] = Stored("BOOL", (vocab,), np.isin(np.arange(vocab), kept).tobytes())
    queries, keys_width = heads * head_dim, kv_heads * head_dim
    for i in range(num_layers):
        layer = f"layers.{i}."
        tensors |= {
            f"{layer}self_attn.q_proj.weight": weight(queries, hidden),
            f"{layer}self_attn.k_proj.weight": weight(keys_width, hidden),
            f"{layer}self_attn.v_proj.weight": weight(keys_width, hidden),
            f"{layer}self_attn.o_proj.weight": weight(hidden, queries),
            f"{layer}self_attn.q_norm.weight": norm(head_dim),
            f"{layer}self_attn.k_norm.weight": norm(head_dim),
            f"{layer}mlp.gate_proj.weight": weight(intermediate, hidden),
            f"{layer}mlp.up_proj.weight": weight(intermediate, hidden),
            f"{layer}mlp.down_proj.weight": weight(hidden, intermediate),
            f"{layer}input_layernorm.weight": norm(),
            f"{layer}post_attention_layernorm.weight": norm(),
        }
        if kind == "dflash2":
            for conv in ("attention_conv", "mlp_conv"):
                tensors[f"{layer}{conv}.base_kernel"] = store(
                    rng.standard_normal((2, 2, hidden), dtype=np.float32) / 4 + [[[1]], [[0]]],
                    dtype,
                )
                added = weight(2 * 2 * hidden // 16, hidden)
                tensors[f"{layer}{conv}.kernel_projection.weight"] = added
    if kind == "dflash2":
        tensors |= {
            "candidate_selector.predecessor_codebook": weight(vocab, 24),
            "candidate_selector.successor_codebook": weight(vocab, 24),
            "candidate_selector.hidden_projection.weight": weight(24, hidden),
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(README, newline="", encoding="utf-8")
    (folder / "dflash.py").write_text("class DFlashDraftModel: ...\n", encoding="utf-8")
    if mask_embedding:
        vector = torch.from_numpy(rng.standard_normal(hidden, dtype=np.float32))
        saved = {"embedding": vector.bfloat16(), "mask_token_id": MASK_TOKEN_ID}
        torch.save(saved, folder / "mask_embedding.pt")
    renamed = {_spelled(name, spelling): tensor for name, tensor in tensors.items()}
    write_tensors(folder, renamed, sharded=sharded, metadata={"format": "pt"})
    return folder


def _spelled(name: str, spelling: Spelling) -> str:
    module, _, leaf = name.rpartition(".")
    module = _RENAMED.get(spelling, {}).get(module, module)
    return f"{_OUTER.get(spelling, '')}{module}.{leaf}" if module else name
