"""The comparison as a page, and its plot as a drawing of its own."""

from jinja2 import PackageLoader
from markupsafe import Markup

from ..charts.forest import Interval, forest
from ..charts.svg import standalone
from ..judging.verdict import in_percent
from ..report import words
from ..report.html_report import render
from .draft_comparison import ComparisonReport
from .scopes import Scope

MOST_DRAWN = 60
"""Scopes, or drafts where they are many; the table has all."""


def page(report: ComparisonReport) -> str:
    """The whole page."""
    return render(
        "comparison.html.j2",
        PackageLoader(__package__, ""),
        report=report,
        compared=[scope for scope in report.scopes if scope.changes],
        small=[scope for scope in report.scopes if not scope.changes],
        plot=Markup(plot(report)),
        command=words.command(report.argv),
    )


def drawing(report: ComparisonReport) -> str:
    """The plot as a file of its own (SVG)."""
    return standalone(plot(report))


def plot(report: ComparisonReport) -> str:
    """Changes against the first draft with simultaneous intervals, as the element `svg`.

    Of all that were compared; categories of too few prompts are left out. Of many drafts those with
    the longest acceptance, over the whole.
    """
    first, *others = report.names
    if report.is_many:
        rows = _rows_of_many(report.whole, report.names)
        others = []
    else:
        compared = [scope for scope in report.scopes if scope.changes][:MOST_DRAWN]
        rows = [row for scope in compared for row in _rows(scope, report.names)]
    return forest(
        "comparison",
        rows,
        title=f"Change of the acceptance length against {first}",
        bounds=f"simultaneous {in_percent(report.confidence)} intervals",
        series=others,
    )


def _rows_of_many(scope: Scope, names: tuple[str, ...]) -> list[Interval]:
    """One row for every draft, over the whole alone, the longest acceptance first."""
    changes = scope.against_first(names)
    return [
        Interval(
            label=names[place],
            estimate=None if change is None else change.relative_change,
            lower=None if change is None else change.lower,
            upper=None if change is None else change.upper,
        )
        for place in scope.ranked[1:][:MOST_DRAWN]
        for change in [changes[place - 1]]
    ]


def _rows(scope: Scope, names: tuple[str, ...]) -> list[Interval]:
    """One row for every draft but the first, the scope's name beside the first of them."""
    return [
        Interval(
            label="" if series else scope.name,
            estimate=None if change is None else change.relative_change,
            lower=None if change is None else change.lower,
            upper=None if change is None else change.upper,
            whole=scope.is_whole,
            series=series,
        )
        for series, change in enumerate(scope.against_first(names))
    ]
