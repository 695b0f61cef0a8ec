"""Tiny drafts in other dimensions than those of `cases.py`, which other tools then quantize.

Head counts, widths and groups that do not divide each other, one to three layers, whole and pruned
vocabularies, and the architecture names that published drafts have.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asking import TARGET_FOLDER, write_target
from tiny import edit_json, tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_mla import tiny_eagle3_mla
from tiny_speculators import Sizes, tiny_speculators_dflash, tiny_speculators_eagle3

FLOAT16 = {"dtype": "F16", "config": {"torch_dtype": "float16"}}


@dataclass(frozen=True, slots=True)
class Draft:
    """One draft: a builder and its arguments.

    Attributes:
        changes: of config.json afterwards; None removes a key.
    """

    build: Callable[..., Path]
    arguments: Mapping[str, Any]
    changes: Mapping[str, Any] | None = None


def _llama(hidden: int, intermediate: int, heads: int, kv_heads: int, **more: Any) -> Draft:
    changes = more.pop("changes", None)
    sizes = {"hidden": hidden, "intermediate": intermediate, "heads": heads, "kv_heads": kv_heads}
    return Draft(tiny_eagle3_llama, {"vocab": 320, "head_dim": 64, **sizes, **more}, changes)


def _mla(hidden: int, intermediate: int, heads: int, **more: Any) -> Draft:
    ranks = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "v_head_dim": 128}
    sizes = {"hidden": hidden, "intermediate": intermediate, "heads": heads, "vocab": 320}
    return Draft(tiny_eagle3_mla, {**sizes, **ranks, "qk_rope_head_dim": 64, **more})


def _dflash(hidden: int, intermediate: int, heads: int, kv_heads: int, **more: Any) -> Draft:
    sizes = {"hidden": hidden, "intermediate": intermediate, "heads": heads, "kv_heads": kv_heads}
    return Draft(tiny_dflash, {"vocab": 320, "head_dim": 64, **sizes, **more})


_PRUNED = {"pruned_vocabulary": True}
_ANGELSLIM = {"architectures": ["Eagle3LlamaForCausalLM"]}
DRAFTS: Mapping[str, Draft] = {
    "llama-384": _llama(384, 640, 6, 2, **_PRUNED),
    "llama-512": _llama(512, 1408, 8, 8),
    "llama-three": _llama(256, 768, 8, 2, head_dim=32, num_layers=3, **_PRUNED),
    "llama-tied": _llama(256, 512, 8, 4, head=False, changes={"tie_word_embeddings": True}),
    "llama-angelslim": _llama(384, 768, 12, 4, changes=_ANGELSLIM, **_PRUNED),
    "llama-float16": _llama(256, 1024, 8, 4, **_PRUNED, **FLOAT16),
    "mla-512": _mla(512, 1024, 8, architecture="Eagle3DeepseekV3ForCausalLM"),
    "mla-modelopt": _mla(256, 896, 8, modelopt=True),
    "dflash-pruned": _dflash(256, 512, 8, 8, num_layers=2, head=True, **_PRUNED),
    "dflash-float16": _dflash(256, 768, 16, 4, num_layers=2, **FLOAT16),
    "speculators-llama": Draft(tiny_speculators_eagle3, {"sizes": Sizes(256, 640, 64)}),
    "speculators-qwen3": Draft(
        tiny_speculators_eagle3, {"sizes": Sizes(384, 1024, 96), "layer_type": "qwen3"}
    ),
    "speculators-dflash": Draft(tiny_speculators_dflash, {"sizes": Sizes(256, 768, 64)}),
}


def write_drafts(out: Path) -> None:
    """Write every draft, and beside it the config.json of a target that it can draft for.

    Args:
        out: created; its parent must exist. Each draft is `out/NAME/draft`.
    """
    out.mkdir()
    for name, draft in DRAFTS.items():
        place = out / name
        place.mkdir()
        folder = draft.build(place / "draft", **draft.arguments)
        if draft.changes:
            edit_json(folder / "config.json", **draft.changes)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= config.get("transformer_layer_config", {})
        write_target(place / TARGET_FOLDER, config["hidden_size"], config["vocab_size"])
