"""Builders of tiny drafts in the speculators layout; keys and tensors as speculators 0.9.0 saves.

See tiny.py. `config` and `layers` override keys of config.json and of its transformer_layer_config.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tiny import Stored, read_tensors, store, tiny_eagle3_llama, write_tensors

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
HEADS, KV_HEADS, VOCAB, DRAFT_VOCAB = 4, 2, 96, 48


class Sizes(NamedTuple):
    """Of a draft; `WIDE` has whole groups of 128 inputs in every linear that recipes quantize."""

    hidden: int
    intermediate: int
    head_dim: int


SMALL, WIDE = Sizes(64, 96, 16), Sizes(128, 256, 32)


def tiny_speculators_eagle3(
    folder: Path,
    *,
    seed: int = 0,
    sizes: Sizes = SMALL,
    layer_type: str = "llama",
    num_layers: int = 1,
    embed: bool = True,
    config: Mapping[str, Any] | None = None,
    layers: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny EAGLE-3 draft with half of the vocabulary, its embedding and its head.

    Args:
        folder: created; its parent must exist.
        layer_type: "llama" or "qwen3" (with q_norm and k_norm).
        embed: with embed_tokens.
    """
    tiny_eagle3_llama(
        folder,
        seed=seed,
        prefix="layers.0.",
        num_layers=num_layers,
        embed=embed,
        pruned_vocabulary=True,
        **sizes._asdict(),
    )
    own = _own_config("eagle3", "Eagle3Speculator", num_draft_tokens=3) | {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "norm_output": False,
    }
    _write_config(folder, own | dict(config or {}), _layers(layer_type, num_layers, layers, sizes))
    added: dict[str, Stored] = {}
    if layer_type == "qwen3":
        added = _head_norms(np.random.default_rng(seed + 1), num_layers, sizes)
    write_tensors(folder, read_tensors(folder) | added, metadata={"format": "pt"})
    return folder


def tiny_speculators_dflash(
    folder: Path,
    *,
    seed: int = 0,
    sizes: Sizes = SMALL,
    num_layers: int = 2,
    embed: bool = True,
    pruned_vocabulary: bool = True,
    config: Mapping[str, Any] | None = None,
    layers: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny DFlash draft.

    Args:
        folder: created; its parent must exist.
        embed: with embed_tokens, which speculators 0.9.0 leaves out and earlier versions saved.
        pruned_vocabulary: half of the vocabulary, with d2t, t2d and lm_head; the whole one has none
            of these three.
    """
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> Stored:
        return store(rng.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5, "BF16")

    def norm() -> Stored:
        return store(1 + 0.1 * rng.standard_normal(sizes.hidden, dtype=np.float32), "BF16")

    queries, keys = HEADS * sizes.head_dim, KV_HEADS * sizes.head_dim
    tensors = {
        "fc.weight": weight(sizes.hidden, 3 * sizes.hidden),
        "hidden_norm.weight": norm(),
        "norm.weight": norm(),
    } | _head_norms(rng, num_layers, sizes)
    for i in range(num_layers):
        tensors |= {
            f"layers.{i}.self_attn.q_proj.weight": weight(queries, sizes.hidden),
            f"layers.{i}.self_attn.k_proj.weight": weight(keys, sizes.hidden),
            f"layers.{i}.self_attn.v_proj.weight": weight(keys, sizes.hidden),
            f"layers.{i}.self_attn.o_proj.weight": weight(sizes.hidden, queries),
            f"layers.{i}.mlp.gate_proj.weight": weight(sizes.intermediate, sizes.hidden),
            f"layers.{i}.mlp.up_proj.weight": weight(sizes.intermediate, sizes.hidden),
            f"layers.{i}.mlp.down_proj.weight": weight(sizes.hidden, sizes.intermediate),
            f"layers.{i}.input_layernorm.weight": norm(),
            f"layers.{i}.post_attention_layernorm.weight": norm(),
        }
    if embed:
        tensors["embed_tokens.weight"] = weight(VOCAB, sizes.hidden)
    if pruned_vocabulary:
        kept = np.sort(rng.permutation(VOCAB)[:DRAFT_VOCAB])
        tensors["lm_head.weight"] = weight(DRAFT_VOCAB, sizes.hidden)
        tensors["d2t"] = Stored("I64", (DRAFT_VOCAB,), (kept - np.arange(DRAFT_VOCAB)).tobytes())
        tensors["t2d"] = Stored("BOOL", (VOCAB,), np.isin(np.arange(VOCAB), kept).tobytes())
    own = _own_config("dflash", "DFlashSpeculator", num_draft_tokens=7) | {
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 8,
        "draft_vocab_size": DRAFT_VOCAB if pruned_vocabulary else VOCAB,
        "mask_token_id": VOCAB - 1,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
    }
    folder.mkdir()
    _write_config(folder, own | dict(config or {}), _layers("qwen3", num_layers, layers, sizes))
    write_tensors(folder, tensors, metadata={"format": "pt"})
    return folder


BUILD: dict[str, Callable[..., Path]] = {
    "eagle3-llama": tiny_speculators_eagle3,
    "eagle3-qwen3": functools.partial(tiny_speculators_eagle3, layer_type="qwen3"),
    "dflash": tiny_speculators_dflash,
}
"""One builder per kind of draft."""


def _own_config(kind: str, architecture: str, *, num_draft_tokens: int) -> dict[str, Any]:
    """The keys that drafts of every kind have."""
    greedy = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [architecture],
        "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "owner/target"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformers_version": "5.19.0",
    }


def _layers(
    model_type: str, num_layers: int, changes: Mapping[str, Any] | None, sizes: Sizes
) -> Mapping[str, Any]:
    """The keys of transformer_layer_config."""
    keys = {
        "attention_bias": False,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": 512,
        "model_type": model_type,
        "num_attention_heads": HEADS,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    if model_type == "qwen3":
        keys["layer_types"] = ["full_attention"] * num_layers
    return keys | dict(changes or {})


def _head_norms(rng: np.random.Generator, num_layers: int, sizes: Sizes) -> dict[str, Stored]:
    """q_norm and k_norm of every layer."""
    return {
        f"layers.{i}.self_attn.{name}.weight": store(
            1 + 0.1 * rng.standard_normal(sizes.head_dim, dtype=np.float32), "BF16"
        )
        for i in range(num_layers)
        for name in ("q_norm", "k_norm")
    }


def _write_config(folder: Path, own: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    """A key changed to None is left out, but for those that the package itself saves as null."""
    kept = {key: value for key, value in own.items() if value is not None}
    keys = {"target_hidden_size": None, **kept, "transformer_layer_config": dict(layers)}
    (folder / "config.json").write_text(
        json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
