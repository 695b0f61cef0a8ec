"""Builder of tiny DSpark drafts: tiny DFlash drafts with a Markov and a confidence head."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tiny import SINGLE_FILE, Drawn, read_tensors, write_tensors
from tiny_dflash import tiny_dflash
from tiny_shapes import dspark

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
        from_anchor: the anchor's slot proposes a token.
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
    if not from_anchor:
        keys["sample_from_anchor"] = False
    (folder / "config.json").write_text(json.dumps(keys | dict(config or {}), indent=2) + "\n")
    tensors = read_tensors(folder)
    for name, tensor in Drawn(seed + 1, dtype).tensors(shapes).items():
        if confidence or not name.startswith("confidence"):
            tensors[_spelled(name, layout)] = tensor
    (folder / SINGLE_FILE).unlink()
    write_tensors(folder, tensors, sharded=sharded, metadata={"format": "pt"})
    return folder


def _spelled(name: str, layout: Layout) -> str:
    module, _, leaf = name.rpartition(".")
    if layout == "modelopt":
        module = _MODELOPT[module]
    return f"{'logit_head.' if layout == 'logit_head' else ''}{module}.{leaf}"
