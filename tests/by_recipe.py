"""A draft quantized by a recipe, as most tests want it: in torch's arithmetic, scales given."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import QuantizeReport, quantize_draft
from draftquant.quantize.planning.quantization_plan import Measured, Plan, make_plan
from draftquant.recipes import Recipe, load_recipe
from draftquant.recipes.schema import BackendName


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
    return make_plan(chosen, read_draft(Checkpoint.open(source)), target_layers=target_layers)


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

    `measured` are other fields of `Measured`; `arguments` those of `quantize_draft`.
    """
    plan = planned(source, recipe, backend=backend, target_layers=target_layers)
    static = plan.recipe.needs_input_scales
    scales = {step.row.module: scale for step in plan.quantized if static}
    known = Measured(input_scales=scales, input_scale_origin="constant", **measured)
    where = DraftSource(folder=source)
    return quantize_draft(plan, out, source=where, measured=known, **arguments)
