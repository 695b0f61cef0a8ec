"""`draftquant compare`: several drafts on the same prompts; which one for which traffic?"""

import argparse
from typing import TYPE_CHECKING

from ..api.compare import compare
from ..console import print_json, print_table, stderr, stdout, table

if TYPE_CHECKING:
    from ...validate.comparison.draft_comparison import ComparisonReport
    from ...validate.comparison.scopes import Change, Scope

VERB = compare
_MOST_OF_A_PART = 5
"""Rows of a category, where drafts are many."""


def run(options: argparse.Namespace) -> int:
    """Compare, and print what was found."""
    report = compare.run(options.settings)
    if options.json:
        print_json(report.to_mapping())
    else:
        _print(report)
    for path in options.settings.files.values():
        stderr().line((str(path), "bold"), ": the comparison")
    return 0


def _print(report: "ComparisonReport") -> None:
    out = stdout()
    numbers = ("prompts", "acceptance length", "change", "lower bound", "upper bound")
    found = table(
        f"Comparison, K = {report.num_draft_tokens}, against {report.names[0]}",
        "category",
        "draft",
        *numbers,
        "",
        right=numbers,
    )
    for scope in report.scopes:
        if not scope.changes:
            continue  # a warning names it
        changes = (None, *scope.against_first(report.names))
        shown = _shown(scope, report)
        for row, place in enumerate(shown):
            name = report.names[place]
            head = ("", "") if row else (scope.name, str(scope.num_prompts))
            mark = "longest" if name == scope.best and not scope.alike else ""
            cells = _cells(changes[place])
            found.row(head[0], name, head[1], f"{scope.lengths[place]:.4f}", *cells, mark)
        if left := len(report.names) - len(shown):
            found.row("", f"{left} more, see --html or --report", *("",) * 6)
    print_table(found)
    out.line(
        f"all bounds hold together with {report.confidence:.2%} confidence; each of them alone has"
        f" {report.confidence_of_each:.2%} ({report.method})"
    )
    out.line((report.answer, "bold"))
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


def _shown(scope: "Scope", report: "ComparisonReport") -> list[int]:
    """Numbers of the drafts: all; of many all over the whole, the first and the best of a part.

    The baseline first, and of many the others by their acceptance length.
    """
    if not report.is_many:
        return list(range(len(report.names)))
    ranked = scope.ranked
    return ranked if scope.is_whole else ranked[:_MOST_OF_A_PART]


def _cells(change: "Change | None") -> tuple[str, str, str]:
    if change is None:
        return ("", "", "")
    return (f"{change.relative_change:+.2%}", f"{change.lower:+.2%}", f"{change.upper:+.2%}")
