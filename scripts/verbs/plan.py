"""`draftquant plan`: every tensor with rule, action and bytes; nothing is written."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...quantize.drafts.shared.mixture import of_any_expert
from ...quantize.engines.contract import EngineCheck, loading_places
from ...quantize.engines.plan_verdicts import (
    nothing_loads,
    planned_verdicts,
    to_mapping,
    verdict_lines,
)
from ...quantize.inspection import open_draft
from ...quantize.planning.quantization_plan import Plan, make_plan
from ...recipes.brief import Brief, megabytes
from ...recipes.chosen_recipe import chosen_recipe
from ..frame.arguments import ByRecipe
from ..frame.console import print_json, print_table, stdout, table
from ..frame.verb import verb

if TYPE_CHECKING:
    from ...quantize.planning.quantization_plan import Plan, Step

# ---- `plan`: what a recipe would do to every tensor, and where the result would load


@dataclass(frozen=True)
class PlanSettings(ByRecipe):
    """Of which draft, by which recipe."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanReport(Brief):
    """What a recipe would do to a draft, found out from headers alone.

    Attributes:
        plan: every tensor with its rule, its action and its bytes.
        loads: what each known engine does with the result, on each of its GPUs.
        warnings: what the command line prints as warnings.
    """

    plan: Plan
    loads: tuple[EngineCheck, ...]
    warnings: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**self.plan.to_mapping(), "engines": to_mapping(self.loads)}

    @override
    def brief(self) -> Mapping[str, object]:
        plan = self.plan
        return {
            "recipe": plan.recipe.name,
            "draft": plan.draft.checkpoint.folder,
            "linears": f"{len(plan.quantized)} to quantize",
            "size": f"{megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}",
            "loads in": loading_places(self.loads),
            "warnings": len(self.warnings) or None,
        }


@verb(PlanSettings)
def plan(settings: PlanSettings) -> PlanReport:
    """Show what a recipe would do to every tensor of a draft. Nothing is written.

    Returns:
        Each tensor with its rule, its action and its bytes, and which engines would load the
        result.

    Raises:
        DraftQuantError: the draft or the recipe cannot be read, or they do not fit each other.
    """
    _, draft = open_draft(settings.draft, settings.subtree, settings.listener)
    recipe = chosen_recipe(settings.choice, settings.listener)
    made = make_plan(recipe, draft, target_layers=settings.target_layers)
    loads = planned_verdicts(made)
    problem = nothing_loads(made, loads)
    if problem:
        settings.listener.warning(problem)
    return PlanReport(plan=made, loads=loads)


VERB = plan


def run(options: argparse.Namespace) -> int:
    """Print every tensor of the plan, and where the result would load."""
    report = plan.run(options.settings)
    if options.json:
        print_json(report.to_mapping())
    else:
        print_plan(report.plan)
        for line in verdict_lines(report.loads):
            stdout().line(line)
    return 0


def print_plan(plan: "Plan") -> None:
    """Print a plan as a table with its sums."""
    from ...quantize.drafts.geometry import vocabulary_share

    recipe = plan.recipe
    mixed = len(recipe.formats) > 1
    columns = ["tensor", "role", "rule", "action", "shape", "before", "after"]
    columns[4:4] = ["format"] if mixed else []
    found = table(
        f"Plan: {recipe.name} on {plan.draft.checkpoint.folder} ({plan.draft.family.name}),"
        f" layout {recipe.layout}, backend {recipe.backend}",
        *columns,
        right=("rule", "before", "after"),
        spare=("shape", "rule", "role"),
    )
    for step, count in _experts_as_one(plan):
        style = "green" if step.action == "quantize" else ""
        form = str(plan.format_of(step)) if step.action == "quantize" else ""
        found.row(
            _name(step, count),
            step.row.role,
            str(step.rule),
            step.action,
            *([form] if mixed else []),
            str(list(step.row.tensor.shape)),
            f"{count * step.bytes_before:,}",
            f"{count * step.bytes_after:,}",
            style=style,
        )
    found.add_section()
    found.row(
        "total",
        "",
        "",
        f"{len(plan.quantized)} quantized",
        *([""] if mixed else []),
        "",
        f"{plan.bytes_before:,}",
        f"{plan.bytes_after:,}",
        style="bold",
    )
    out = stdout()
    print_table(found)
    if (share := vocabulary_share(plan.draft.geometry)) is not None:
        out.line(f"{share}: the head has rows for no other tokens")
    if (cache := plan.recipe.kv_cache) is not None:
        need = f"({cache.scales}) need 'quantize --traces T'"
        layers = f"the scales of keys and values of {len(plan.cache)} layer(s)"
        how = "are 1.0" if cache.scales == "unit" else need
        out.line(f"KV cache in {cache.dtype}: {layers} {how}")
    if plan.balanced is not None:
        norm, _ = plan.balanced
        out.line(
            f"{norm.row.tensor.name} is divided by a power of two where the halves of the concat"
            " input differ by 4 or more (balance_concat: auto); else it is kept byte for byte"
        )
    if plan.learned_norms:
        out.line(
            f"{len(plan.learned_norms)} norm(s) learn with the quantized values (norms: learned):"
            " these are not kept byte for byte"
        )
    if plan.dropped:
        names = ", ".join(f"{s.row.tensor.name} {s.bytes_before:,}" for s in plan.dropped)
        out.line(
            f"dropped, bytes saved: {names}; engines use the target's instead, which 'quantize"
            " --target M' first verifies to be equal byte for byte"
        )
    added = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in plan.overhead().items())
    out.line(
        f"of these, bytes added by the layout: {added};"
        f" output is {plan.bytes_after / plan.bytes_before:.1%} of the source"
    )


def _experts_as_one(plan: "Plan") -> list[tuple["Step", int]]:
    """The steps, of routed experts that have all the same done to them the first, and how many."""
    counts: dict[tuple[Any, ...], int] = {}
    first: dict[tuple[Any, ...], Step] = {}
    for step in plan.steps:
        shape, name = step.row.tensor.shape, step.row.tensor.name
        kind = (of_any_expert(name), step.rule, shape, step.bytes_before, step.bytes_after)
        counts[kind] = counts.get(kind, 0) + 1
        first.setdefault(kind, step)
    return [(step, counts[kind]) for kind, step in first.items()]


def _name(step: "Step", count: int) -> str:
    """A tensor's name, of several experts with the number of them."""
    name = step.row.tensor.name
    return name if count == 1 else f"{of_any_expert(name)} (x{count})"
