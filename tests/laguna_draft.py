"""The drafts with which vLLM's own DFlashLagunaForCausalLM was executed."""

from pathlib import Path
from typing import Any

from k3_draft import SHAPE
from tiny_dflash import tiny_laguna

CASES: dict[str, dict[str, Any]] = {
    "published": {},
    "gates-of-elements": {"gating": "per-element"},
    "no-gates": {"gating": False},
    "full-attention": {"layer_types": ["full_attention"] * 2, "gating": True},
    "both-ways": {"dflash_config": {"causal": False}},
}


def write_draft(folder: Path, case: str) -> Path:
    """The draft of a case, whose embedding is the target's table of both."""
    config = dict(CASES[case])
    own = config.pop("dflash_config", None)
    return tiny_laguna(folder, seed=3, embed=True, config=config, own=own, **SHAPE)
