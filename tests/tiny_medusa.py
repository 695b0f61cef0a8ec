"""Builder of tiny Medusa heads, under each of the names that they are published with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tiny import Stored, store, write_tensors

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
Spelling = Literal["vllm", "old", "tensorrt-llm"]


def tiny_medusa(
    folder: Path,
    *,
    spelling: Spelling = "vllm",
    root: str = "",
    num_heads: int = 3,
    layers: int = 1,
    biases: bool = False,
    shared_head: bool = False,
    truncated: int | None = None,
    hidden: int = 64,
    vocab: int = 96,
    seed: int = 0,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write tiny Medusa heads.

    Args:
        folder: created; its parent must exist.
        spelling: of names: vLLM's, FasterDecoding's ("old") or TensorRT-LLM's.
        root: prefix of all names, such as "medusa_heads.".
        num_heads: K. layers: residual blocks of each head.
        biases: blocks have some, and config.json says so.
        shared_head: one lm_head for all. truncated: rows of it, fewer than `vocab`.
        hidden: width. vocab: the target's tokens.
        seed: of the weights.
        dtype: they are stored in.
        config: overrides of config.json.
    """
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> Stored:
        values = rng.standard_normal(shape, dtype=np.float32)
        return store(values / shape[-1] ** 0.5, dtype)

    tensors: dict[str, Stored] = {}
    for i in range(num_heads):
        for j in range(layers):
            block = {
                "vllm": f"blocks.{i}.layers.{j}",
                "old": f"{i}.{j}.linear",
                "tensorrt-llm": f"{i}.medusa_layers.{j}.linear",
            }[spelling]
            tensors[f"{root}{block}.weight"] = weight(hidden, hidden)
            if biases:
                tensors[f"{root}{block}.bias"] = weight(hidden)
        if not shared_head:
            head = {"vllm": f"lm_heads.{i}", "old": f"{i}.{layers}", "tensorrt-llm": f"{i}.lm_head"}
            tensors[f"{root}{head[spelling]}.weight"] = weight(vocab, hidden)
    if shared_head:
        tensors["lm_head.weight"] = weight(truncated or vocab, hidden)
    if truncated is not None:
        ids = np.sort(rng.permutation(vocab)[:truncated]).astype("<i8")
        tensors["token_map"] = Stored("I64", ids.shape, ids.tobytes())
    folder.mkdir()
    declared = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_heads": num_heads,
        "num_hidden_layers": layers,
        "medusa_fc_bias": biases,
        "original_lm_head": shared_head,
        "truncated_vocab_size": truncated or vocab,
        "torch_dtype": _DTYPES[dtype],
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(declared, indent=2) + "\n", encoding="utf-8")
    write_tensors(folder, tensors)
    return folder
