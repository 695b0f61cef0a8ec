"""Builders of tiny DSpark drafts: tiny DFlash drafts or layers with latent attention, and heads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tiny import (
    SINGLE_FILE,
    Drawn,
    edit_json,
    optional,
    publish,
    read_tensors,
    size_keys,
    write_tensors,
)
from tiny_dflash import MASK_TOKEN_ID, tiny_dflash
from tiny_mla import LATENT
from tiny_shapes import dspark, latent_attention, mlp, named, tables

Layout = Literal["flat", "specforge", "logit_head", "modelopt"]
_MODELOPT = {
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "confidence_proj",
}


def tiny_dspark(
    folder: Path,
    *,
    seed: int = 0,
    layout: Layout = "flat",
    rank: int = 16,
    confidence: bool = True,
    dtype: str = "BF16",
    sharded: bool = False,
    config: Mapping[str, Any] | None = None,
    **body: Any,
) -> Path:
    """Write a tiny DSpark draft: config.json, weights and side files.

    Args: see `tiny_dflash`, and

        layout: "flat" as DeepSpec publishes, with all keys at the top level; "specforge" with those
            of the heads in dflash_config; "logit_head" as that with its older names; "modelopt"
            as that with ModelOpt's names.
        rank: of the Markov head.
        confidence: with a confidence head.
    """
    tiny_dflash(folder, seed=seed, dtype=dtype, **body)
    keys = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shapes = dspark(keys, rank) | {"confidence_head.proj.bias": (1,)}
    own = {
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": True,
    }
    keys["architectures"] = ["Qwen3DSparkModel" if layout == "flat" else "DSparkDraftModel"]
    if layout == "flat":
        keys |= {**keys.pop("dflash_config"), **own}
    else:
        keys["dflash_config"] |= {"projector_type": "dspark", **own}
    if layout == "modelopt":
        keys["architectures"] = ["DFlashDraftModel"]
        keys["dflash_config"]["shift_label"] = True
    (folder / "config.json").write_text(json.dumps(keys | dict(config or {}), indent=2) + "\n")
    tensors = read_tensors(folder)
    for name, tensor in Drawn(seed + 1, dtype).tensors(shapes).items():
        if confidence or not name.startswith("confidence"):
            tensors[_spelled(name, layout)] = tensor
    (folder / SINGLE_FILE).unlink()
    write_tensors(folder, tensors, sharded=sharded, metadata={"format": "pt"})
    return folder


def tiny_nemotron(folder: Path, *, dspark: bool = True, **made: Any) -> Path:
    """Write a tiny draft of Nemotron 3.5, before its weights are quantized; see `tiny_dspark`.

    Its keys and names are those of the published DSpark and DFlash drafts: DSpark's has sinks,
    windows and causal blocks, DFlash's has none of them.
    """
    layers, ids = made.setdefault("num_layers", 2), [1, 3, 5]
    nested = {
        "attention_sink_bias": dspark, "causal": dspark, "mask_token_id": MASK_TOKEN_ID,
        "sample_from_anchor": False, "target_layer_ids": ids, "use_swa": dspark,
        **({"swa_window_size": 5} if dspark else {}),
    }  # fmt: skip
    own = {
        "attention_sink_bias": dspark, "dflash_query_causal": dspark, "draft_vocab_size": None,
        "dtype": "bfloat16", "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "has_embed_tokens": True, "has_lm_head": False, "hidden_act": "silu",
        "layer_types": [f"{'sliding' if dspark else 'full'}_attention"] * layers,
        "mask_token_id": MASK_TOKEN_ID, "max_position_embeddings": 512, "model_type": "qwen3",
        "num_aux_layers": 3, "rope_parameters": None, "sample_from_anchor": False,
        "sliding_window": 5 if dspark else None, "target_layer_ids": ids,
    }  # fmt: skip
    if dspark:
        own |= {"dspark_bonus_anchor": True, "dspark_markov_rank": 16}
        made |= {"rank": 16, "confidence": False}
    config = {**own, "dflash_config": nested, **made.pop("config", {})}
    build = tiny_dspark if dspark else tiny_dflash
    build(folder, embed=True, own=nested, config=config, **made)
    absent = ("causal", "use_swa", "swa_window_size", "num_target_layers")
    edit_json(folder / "config.json", **dict.fromkeys(absent))
    return folder


def tiny_dspark_mla(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 16,
    embed: bool = False,
    dtype: str = "BF16",
    sharded: bool = False,
    config: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write a tiny K3DSparkModel, as Kimi-K3-DSpark is published; see `tiny_dspark`."""
    latent = {name: sizes.pop(name, size) for name, size in LATENT.items()}
    keys = size_keys(**{"num_layers": 2, **sizes}, dtype=dtype) | latent
    del keys["head_dim"]
    hidden, layers = keys["hidden_size"], range(keys["num_hidden_layers"])
    yarn = dict.fromkeys(("mscale", "mscale_all_dim"), 1.0) | {"beta_fast": 32, "beta_slow": 1}
    keys |= {
        "architectures": ["K3DSparkModel"],
        "block_size": 7,
        "confidence_head_with_markov": True,
        "draft_vocab_size": keys["vocab_size"],
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": rank,
        "mask_token_id": keys["vocab_size"] - 1,
        "max_position_embeddings": 1024,
        "model_type": "k3_dspark",
        "num_key_value_heads": keys["num_attention_heads"],
        "num_target_layers": 3,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 50000.0,
            "rope_type": "yarn", **yarn,
        },
        "rope_theta": 50000.0,
        "target_hidden_size": hidden,
        "target_layer_ids": [1, 3, 5],
        "target_num_hidden_layers": 8,
    }  # fmt: skip
    shapes = {"context_proj.weight": (hidden, 3 * hidden), "context_norm.weight": (hidden,)}
    shapes |= {"final_norm.weight": (hidden,)} | tables(keys, optional(embed_tokens=embed))
    for i in layers:
        shapes |= named(f"layers.{i}.", latent_attention(keys, hidden) | mlp(keys))
    shapes |= dspark(keys, rank) | {"confidence_head.proj.bias": (1,)}
    tensors = Drawn(seed, dtype).tensors(shapes)
    return publish(folder, keys | dict(config or {}), tensors, sharded=sharded)


def _spelled(name: str, layout: Layout) -> str:
    module, _, leaf = name.rpartition(".")
    if layout == "modelopt":
        module = _MODELOPT[module]
    return f"{'logit_head.' if layout == 'logit_head' else ''}{module}.{leaf}"
