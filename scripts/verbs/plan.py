"""`plan`: what a recipe would do to every tensor, and where the result would load."""

from typing import TYPE_CHECKING, Any

from ...quantize.asked import Planning
from ..frame import reports
from ..frame.console import print_table, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...quantize.planning.quantization_plan import Plan, Step


@verb(Planning)
def plan(settings: Planning) -> "reports.PlanReport":
    """Show what a recipe would do to every tensor of a draft. Nothing is written.

    Returns:
        Each tensor with its rule, its action and its bytes, and which engines would load the
        result.

    Raises:
        DraftQuantError: the draft or the recipe cannot be read, or they do not fit each other.
    """
    from ...quantize.inspection import plan_draft

    return plan_draft(settings)


def _show(report: "reports.PlanReport", _settings: object) -> None:
    from ...quantize.engines.plan_verdicts import verdict_lines

    print_plan(report.plan)
    for line in verdict_lines(report.loads):
        stdout().line(line)


def print_plan(plan: "Plan") -> None:
    """A plan as a table with its sums."""
    from ...quantize.drafts.geometry import vocabulary_share

    recipe = plan.recipe
    mixed = len(recipe.formats) > 1
    columns = ["tensor", "role", "rule", "action", "shape", "before", "after"]
    columns[4:4] = ["format"] if mixed else []
    rows = table(
        f"Plan: {recipe.name} on {plan.draft.checkpoint.folder} ({plan.draft.family.name}),"
        f" layout {recipe.layout}, backend {recipe.backend}",
        *columns,
        spare=("shape", "rule", "role"),
    )
    for step, count in _experts_as_one(plan):
        form = str(plan.format_of(step)) if step.action == "quantize" else ""
        rows.row(
            _name(step, count),
            step.row.role_and_rule,
            str(step.rule),
            step.action,
            *([form] if mixed else []),
            str(list(step.row.tensor.shape)),
            f"{count * step.bytes_before:,}",
            f"{count * step.bytes_after:,}",
        )
    rows.row(
        "total",
        "",
        "",
        f"{len(plan.quantized)} quantized",
        *([""] if mixed else []),
        "",
        f"{plan.bytes_before:,}",
        f"{plan.bytes_after:,}",
    )
    out = stdout()
    print_table(rows)
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
    """The steps, with the first of routed experts that are treated alike, and their number."""
    from ...quantize.drafts.shared.mixture import of_any_expert

    counts: dict[tuple[Any, ...], int] = {}
    first: dict[tuple[Any, ...], Step] = {}
    for step in plan.steps:
        shape, name = step.row.tensor.shape, step.row.tensor.name
        kind = (of_any_expert(name), step.rule, shape, step.bytes_before, step.bytes_after)
        counts[kind] = counts.get(kind, 0) + 1
        first.setdefault(kind, step)
    return [(step, counts[kind]) for kind, step in first.items()]


def _name(step: "Step", count: int) -> str:
    from ...quantize.drafts.shared.mixture import of_any_expert

    name = step.row.tensor.name
    return name if count == 1 else f"{of_any_expert(name)} (x{count})"


COMMAND = Command(plan, _show)
