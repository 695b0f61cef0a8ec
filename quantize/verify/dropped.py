"""Tables that a folder leaves to its target: absent because the target has the very same ones.

Shown by comparing them byte for byte, before they are dropped and whenever the target is at hand.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ...recipes.schema import Recipe
from ..drafts import Draft, Row
from ..files.checkpoint import PROVENANCE_FILE
from ..files.provenance import QuantizedProvenance
from ..stored.stored_tables import StoredTables
from .method import claiming
from .verify_report import Fault


def dropped_rows(recipe: Recipe, draft: Draft) -> tuple[Row, ...]:
    """The tables of a draft that a recipe leaves to the target."""
    rules = ((row, claiming(recipe, row)) for row in draft.rows)
    return tuple(row for row, rule in rules if rule is not None and rule.action == "drop")


def remaining(draft: Draft, dropped: Collection[Row]) -> Draft:
    """The draft as it is without some tables."""
    return replace(draft, rows=tuple(row for row in draft.rows if row not in dropped))


def dropped_faults(
    draft: Draft,
    dropped: Collection[Row],
    recorded: QuantizedProvenance | None,
    target: Path | None,
) -> list[Fault]:
    """What is recorded of dropped tables is what the recipe drops, and equals the target's.

    Args:
        recorded: draftquant.json of the folder; None for a run that has not written it yet.
        target: folder of the target; None = nothing is shown.

    Raises:
        CheckpointError: the target has no such tables.
    """
    faults = []
    names = sorted(row.tensor.name for row in dropped)
    if recorded is not None and sorted(recorded.dropped) != names:
        where, got = f"{PROVENANCE_FILE}: dropped", ", ".join(sorted(recorded.dropped)) or "none"
        faults.append(Fault(where=where, expected=", ".join(names) or "none", got=got))
    if target is None or not dropped:
        return faults
    tables = StoredTables.find(target)
    for row in dropped:
        problem = tables.difference(draft.checkpoint, row.tensor, row.canonical)
        if problem is not None:
            expected = "the target's table, which stands for it"
            faults.append(Fault(where=row.tensor.name, expected=expected, got=f"it {problem}"))
    return faults
