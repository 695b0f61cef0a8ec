"""Builder of tiny DSpark drafts: tiny DFlash drafts with a Markov and a confidence head."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tiny import Stored, read_tensors, store, write_tensors
from tiny_dflash import tiny_dflash

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
    from_anchor: bool = True,
    hidden: int = 64,
    vocab: int = 96,
    dtype: str = "BF16",
    sharded: bool = False,
    config: Mapping[str, Any] | None = None,
    **body: Any,
) -> Path:
    """Write a tiny DSpark draft: config.json, weights and side files.

    Args:
        folder: created; its parent must exist.
        seed: of the weights.
        layout: "flat" as DeepSpec publishes, with all keys at the top level; "specforge" with those
            of the heads in dflash_config; "logit_head" as that with its older names; "modelopt"
            as that with ModelOpt's names.
        rank: of the Markov head.
        confidence: with a confidence head.
        from_anchor: the anchor's slot proposes a token.
        hidden: width. vocab: tokens of the target.
        dtype: of every weight.
        sharded: see `tiny_dflash`.
        config: overrides of config.json.
        body: other arguments of `tiny_dflash`.
    """
    tiny_dflash(folder, seed=seed, hidden=hidden, vocab=vocab, dtype=dtype, **body)
    keys = json.loads((folder / "config.json").read_text(encoding="utf-8"))
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
    if not from_anchor:
        keys["sample_from_anchor"] = False
    keys |= config or {}
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")

    rng = np.random.default_rng(seed + 1)

    def noise(*shape: int) -> Stored:
        return store(rng.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5, dtype)

    tensors = read_tensors(folder)
    tensors |= {
        _spelled(name, layout): noise(*shape)
        for name, shape in _shapes(
            rank, hidden, vocab, keys.get("draft_vocab_size") or vocab, confidence
        ).items()
    }
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write_tensors(folder, tensors, sharded=sharded, metadata={"format": "pt"})
    return folder


def _shapes(
    rank: int, hidden: int, vocab: int, draft_vocab: int, confidence: bool
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (draft_vocab, rank),
    }
    if confidence:
        shapes["confidence_head.proj.weight"] = (1, hidden + rank)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def _spelled(name: str, layout: Layout) -> str:
    module, _, leaf = name.rpartition(".")
    if layout == "modelopt":
        module = _MODELOPT[module]
    return f"{'logit_head.' if layout == 'logit_head' else ''}{module}.{leaf}"
