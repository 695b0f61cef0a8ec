"""Builders of tiny drafts in the speculators layout; keys and tensors as speculators 0.9.0 saves.

See tiny.py. `config` and `layers` override keys of config.json and of its transformer_layer_config.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash

VOCAB, DRAFT_VOCAB = 96, 48


def tiny_speculators_eagle3(
    folder: Path,
    *,
    layer_type: str = "llama",
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
    normed = layer_type == "qwen3"
    tiny_eagle3_llama(
        folder, prefix="layers.0.", embed=embed, pruned_vocabulary=True, normed=normed
    )
    own = _own_config("eagle3", "Eagle3Speculator", num_draft_tokens=3) | {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "norm_output": False,
    }
    return _configured(folder, {**own, **(config or {})}, layer_type, layers)


def tiny_speculators_dflash(
    folder: Path,
    *,
    embed: bool = True,
    pruned_vocabulary: bool = True,
    layers: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny DFlash draft.

    Args:
        folder: created; its parent must exist.
        embed: with embed_tokens, which speculators 0.9.0 leaves out and earlier versions saved.
        pruned_vocabulary: half of the vocabulary, with d2t, t2d and lm_head; the whole one has none
            of these three.
    """
    sizes = {"num_layers": 2, "head_dim": 16}
    tiny_dflash(folder, embed=embed, pruned_vocabulary=pruned_vocabulary, **sizes)
    for name in ("README.md", "dflash.py"):
        (folder / name).unlink()
    own = _own_config("dflash", "DFlashSpeculator", num_draft_tokens=7) | {
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 8,
        "draft_vocab_size": DRAFT_VOCAB if pruned_vocabulary else VOCAB,
        "mask_token_id": VOCAB - 1,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
    }
    return _configured(folder, own, "qwen3", layers)


BUILD: dict[str, Callable[..., Path]] = {
    "eagle3-llama": tiny_speculators_eagle3,
    "eagle3-qwen3": functools.partial(tiny_speculators_eagle3, layer_type="qwen3"),
    "dflash": tiny_speculators_dflash,
}
"""One builder per kind of draft."""


def _own_config(kind: str, architecture: str, *, num_draft_tokens: int) -> dict[str, Any]:
    """The keys that drafts of every kind have."""
    greedy = {"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1}
    return {
        "architectures": [architecture],
        "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy | {"speculative_tokens": num_draft_tokens}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "owner/target"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformers_version": "5.19.0",
    }


def _configured(
    folder: Path, own: Mapping[str, Any], layer_type: str, layers: Mapping[str, Any] | None
) -> Path:
    """A key changed to None is left out, but for those that the package itself saves as null."""
    was = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    counts = ("head_dim", "hidden_size", "intermediate_size", "num_attention_heads")
    keys = {key: was[key] for key in (*counts, "num_hidden_layers", "num_key_value_heads")} | {
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "model_type": layer_type,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    if layer_type == "qwen3":
        keys["layer_types"] = ["full_attention"] * keys["num_hidden_layers"]
    kept = {key: value for key, value in own.items() if value is not None}
    layer = keys | dict(layers or {})
    kept = {"target_hidden_size": None, **kept, "transformer_layer_config": layer}
    text = json.dumps(kept, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
