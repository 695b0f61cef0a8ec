"""A draft's folder as most tests want it: read, planned, quantized in torch's arithmetic."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.family import Draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.lints.catalogue import find_lints
from draftquant.quantize.making.quantize_draft import QuantizeReport, quantize_draft
from draftquant.quantize.planning.quantization_plan import MeasuredInputs, Plan, make_plan
from draftquant.recipes import Recipe, load_recipe
from draftquant.recipes.schema import BackendName

WIDE: dict[str, dict[str, Any]] = {
    "eagle3-llama": {"hidden": 128, "intermediate": 256, "head_dim": 32},
    "eagle3-mla": {"hidden": 128, "intermediate": 256, "q_lora_rank": 128},
    "dflash": {"hidden": 128, "intermediate": 256},
}
"""Every linear that recipes quantize has a multiple of 128 inputs."""


def dimensions(family: str, recipe: str) -> dict[str, Any]:
    """Arguments for the tiny builder of a family; none for recipes without groups."""
    return WIDE[family] if load_recipe(recipe).weights.group_size else {}


def draft_of(folder: Path) -> Draft:
    return read_draft(Checkpoint.open(folder))


def read_as(draft: Draft, config: Mapping[str, Any]) -> tuple[Draft, list[str]]:
    """The draft as its family reads it with another config.json, and what is odd about it."""
    read = read_draft(dataclasses.replace(draft.checkpoint, config=config))
    return read, [lint.name for lint in find_lints(read)]


def planned(
    source: Path,
    recipe: Recipe | str,
    *,
    backend: BackendName = "torch",
    target_layers: int | None = None,
) -> Plan:
    """The plan of a folder by a recipe, or by the name of a built-in one."""
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    chosen = dataclasses.replace(chosen, backend=backend)
    return make_plan(chosen, draft_of(source), target_layers=target_layers)


def quantized(
    source: Path,
    recipe: Recipe | str,
    out: Path,
    *,
    scale: float = 0.25,
    measured: Mapping[str, Any] = MappingProxyType({}),
    backend: BackendName = "torch",
    target_layers: int | None = None,
    **arguments: Any,
) -> QuantizeReport:
    """The folder written; every linear's input has the one static scale, where scales are static.

    `measured` are other fields of `MeasuredInputs`; `arguments` those of `quantize_draft`.
    """
    plan = planned(source, recipe, backend=backend, target_layers=target_layers)
    scales = {step.row.module: scale for step in plan.quantized if plan.recipe.needs_input_scales}
    known = MeasuredInputs(input_scales=scales, input_scale_origin="constant", **measured)
    return quantize_draft(plan, out, source=DraftSource(folder=source), measured=known, **arguments)
