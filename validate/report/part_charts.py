"""What the page draws of the parts of a comparison: their changes, and the curve by context."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ..charts.acceptance_charts import ContextLength
from ..charts.forest import Interval, forest
from ..counting.paired_change import PairedChange
from ..judging.judgement import GateReport
from ..judging.verdict import in_percent

MOST_DRAWN = 60
"""Categories in a chart; the table has all."""


def intervals(found: GateReport) -> tuple[Interval, ...]:
    """Rows of the forest plot: the whole, categories (of many those of most prompts), bins."""
    largest = sorted(found.categories, key=lambda own: -own.num_prompts)[:MOST_DRAWN]
    return (
        interval("all prompts", found.change, found.policy.max_relative_drop, whole=True),
        *(
            interval(own.category, own.change, own.max_relative_drop, judged=bool(own.outcome))
            for own in found.parts.all
            if own in largest or own.is_context_bin
        ),
    )


def context_lengths(found: GateReport) -> list[ContextLength]:
    """The curve by context bin."""
    return [
        ContextLength(
            label=own.category.removeprefix("context "),
            baseline=own.baseline_mean_acceptance_length,
            candidate=own.candidate_mean_acceptance_length,
        )
        for own in found.context_bins
    ]


def forest_of(key: str, drawn: Sequence[tuple[str, GateReport]]) -> str:
    """Each comparison's whole, categories and context bins beside their limits.

    Args:
        key: see `Drawing`.
        drawn: comparisons that have a change, under their titles; several are drawn as series.
    """
    rows = [
        replace(row, series=i) for i, (_, found) in enumerate(drawn) for row in intervals(found)
    ]
    labels = list(dict.fromkeys(row.label for row in rows))
    rows.sort(key=lambda row: labels.index(row.label))
    before = [None, *(row.label for row in rows)]
    named = [
        replace(row, label="") if row.label == last else row
        for row, last in zip(rows, before, strict=False)
    ]
    first = drawn[0][1]
    assert first.change is not None
    return forest(
        key,
        named,
        title="Change of the acceptance length with its bounds, by category",
        bounds=f"one-sided {in_percent(first.change.confidence)} bounds"
        f"{', those of parts together' if first.parts.bounds_hold_together else ''}",
        series=[title for title, _ in drawn] if len(drawn) > 1 else (),
    )


def interval(
    label: str,
    found: PairedChange | None,
    max_relative_drop: float,
    *,
    whole: bool = False,
    judged: bool = True,
) -> Interval:
    """A change as a row of a forest plot; see `Interval`."""
    if found is None:
        return Interval(label=label, estimate=None, limit=-max_relative_drop, whole=whole)
    return Interval(
        label=label,
        estimate=found.relative_change,
        lower=math.expm1(found.lower),
        upper=math.expm1(found.upper),
        limit=-max_relative_drop,
        whole=whole,
        judged=judged,
    )
