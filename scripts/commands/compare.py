"""`draftquant compare`: several drafts on the same prompts; which one for which traffic?"""

import argparse
from typing import TYPE_CHECKING

from ..api.compare import compare
from ..console import print_json, print_table, stderr, stdout, table

if TYPE_CHECKING:
    from ...validate.comparison.draft_comparison import Change, ComparisonReport

VERB = compare


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
        for place, (name, change) in enumerate(zip(report.names, changes, strict=True)):
            head = ("", "") if place else (scope.name, str(scope.num_prompts))
            mark = "longest" if name == scope.best and not scope.alike else ""
            cells = _cells(change)
            found.row(head[0], name, head[1], f"{scope.lengths[place]:.4f}", *cells, mark)
    print_table(found)
    out.line(
        f"all bounds hold together with {report.confidence:.2%} confidence; each of them alone has"
        f" {report.confidence_of_each:.2%} ({report.method})"
    )
    out.line((report.answer, "bold"))
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


def _cells(change: "Change | None") -> tuple[str, str, str]:
    if change is None:
        return ("", "", "")
    return (f"{change.relative_change:+.2%}", f"{change.lower:+.2%}", f"{change.upper:+.2%}")
