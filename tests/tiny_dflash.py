"""Builder of tiny DFlash drafts in all spellings, with their side files; see tiny.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from tiny import Drawn, optional, publish, size_keys
from tiny_shapes import dflash, laguna

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
    block_size: int = 8,
    sharded: bool = False,
    embed: bool = False,
    head: bool = False,
    pruned_vocabulary: bool = False,
    mask_embedding: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write a tiny DFlash draft: config.json, weights and side files.

    Like the published drafts it has neither embedding nor head, and queries wider than the draft.

    Args: see `tiny_eagle3_llama`, and

        kind: DFlash, or what has its layers and more.
        spelling: of tensor names; "torchspec" has a flat config.json as well.
        head: also where the vocabulary is pruned.
        mask_embedding: with mask_embedding.pt.
        own: overrides of dflash_config.
    """
    keys = size_keys(**{"num_layers": 5, "head_dim": 32, **sizes})
    del keys["torch_dtype"]
    layers, vocab = keys["num_hidden_layers"], keys["vocab_size"]
    nested = {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [1, 3, 5]}
    nested |= {**OWN_KEYS[kind], **(own or {})}
    keys |= {
        "architectures": [_ARCHITECTURES[kind]],
        "block_size": block_size,
        "layer_types": ["full_attention"] * layers,
        "model_type": "qwen3",
        "num_target_layers": 8,
        "sliding_window": None,
        **({"draft_vocab_size": vocab // 2} if pruned_vocabulary else {}),
    }
    cut, drawn = pruned_vocabulary, Drawn(seed, dtype)
    has = optional(embed_tokens=embed, lm_head=head or cut, d2t=cut, t2d=cut)
    read = keys | nested | dict(config or {})
    shapes = dflash(read, has, features=3 * keys["hidden_size"], own=OWN_KEYS[kind])
    tensors = drawn.tensors(shapes, vocab=vocab)
    keys |= nested if spelling == "torchspec" else {"dflash_config": nested}
    keys |= {"model_type": "dflash", "num_target_layers": 3} if spelling == "torchspec" else {}
    renamed = {spelled(name, spelling): tensor for name, tensor in tensors.items()}
    publish(folder, keys | dict(config or {}), renamed, sharded=sharded, tokenizer=False)
    (folder / "README.md").write_text(README, newline="", encoding="utf-8")
    (folder / "dflash.py").write_text("class DFlashDraftModel: ...\n", encoding="utf-8")
    if mask_embedding:
        vector = torch.from_numpy(drawn.normal(keys["hidden_size"])).bfloat16()
        saved = {"embedding": vector, "mask_token_id": MASK_TOKEN_ID}
        torch.save(saved, folder / "mask_embedding.pt")
    return folder


def spelled(name: str, spelling: str) -> str:
    """A tensor's name."""
    module, _, leaf = name.rpartition(".")
    module = _RENAMED.get(spelling, {}).get(module, module)
    return f"{_OUTER.get(spelling, '')}{module}.{leaf}" if module else name


def tiny_laguna(
    folder: Path,
    *,
    seed: int = 0,
    embed: bool = False,
    head: bool = False,
    sharded: bool = False,
    config: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write a tiny DFlashLagunaForCausalLM, as poolside's are published; see `tiny_dflash`."""
    keys = size_keys(**{"num_layers": 2, "head_dim": 32, **sizes})
    nested = {"block_size": 8, "mask_token_id": MASK_TOKEN_ID, "num_target_layers": 8,
              "target_layer_ids": [1, 3, 5], "causal": True, **(own or {})}  # fmt: skip
    keys |= {
        "architectures": ["DFlashLagunaForCausalLM"],
        "dflash_config": nested,
        "draft_vocab_size": keys["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        "gating": "per-head",
        "layer_types": ["sliding_attention"] * keys["num_hidden_layers"],
        "model_type": "laguna",
        "num_experts": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": keys.pop("rope_theta")},
        "sliding_window": 12,
        **(config or {}),
    }
    has = optional(embed_tokens=embed, lm_head=head)
    shapes = laguna(keys, has, layers=len(nested["target_layer_ids"]))
    return publish(folder, keys, Drawn(seed).tensors(shapes), sharded=sharded)
