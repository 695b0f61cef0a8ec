"""Builders of tiny language models, and of the mask that makes an EAGLE-3 draft a P-EAGLE one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tiny import Drawn, edit_json, publish, read_tensors, size_keys, store, write_tensors
from tiny_shapes import causal_lm


def tiny_language_model(
    folder: Path, *, kind: str = "Llama", config: Mapping[str, Any] | None = None, **sizes: int
) -> Path:
    """Write a tiny language model, as transformers publishes them.

    Args: see `tiny_eagle3_llama`, and

        kind: "Llama", "Qwen2" (biased queries, keys and values) or "Qwen3" (normed heads).
    """
    keys = size_keys(**sizes) | {
        "architectures": [f"{kind}ForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "model_type": kind.lower(),
    }
    has = {"embed_tokens", "lm_head"}
    shapes = causal_lm(keys, has, biased=kind == "Qwen2", normed=kind == "Qwen3")
    return publish(folder, keys | dict(config or {}), Drawn(0).tensors(shapes))


def with_mask_hidden(folder: Path) -> Path:
    """Make an EAGLE-3 draft a P-EAGLE one: a mask beside its tensors, and the mask's token."""
    values = np.random.default_rng(5).standard_normal((1, 1, 192), dtype=np.float32)
    write_tensors(folder, {**read_tensors(folder), "mask_hidden": store(values, "BF16")})
    edit_json(folder / "config.json", mask_token_id=7)
    return folder
