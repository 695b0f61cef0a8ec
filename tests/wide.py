"""Dimensions of tiny drafts whose linears a recipe can quantize: whole groups of inputs."""

from typing import Any

from draftquant.recipes import load_recipe

WIDE: dict[str, dict[str, Any]] = {
    "eagle3-llama": {"hidden": 128, "intermediate": 256, "head_dim": 32},
    "eagle3-mla": {"hidden": 128, "intermediate": 256, "q_lora_rank": 128},
    "dflash": {"hidden": 128, "intermediate": 256},
}
"""Every linear that recipes quantize has a multiple of 128 inputs."""


def dimensions(family: str, recipe: str) -> dict[str, Any]:
    """Arguments for the tiny builder of a family; none for recipes without groups."""
    return WIDE[family] if load_recipe(recipe).weights.group_size else {}
