"""`compare`: several drafts on the same prompts; which one for which traffic?"""

from typing import TYPE_CHECKING

from ...validate.runs.judging_asked import CompareRun
from ..frame import reports
from ..frame.console import print_table, stderr, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...validate.comparison.draft_comparison import ComparisonReport
    from ...validate.comparison.scopes import Scope


@verb(CompareRun)
def compare(settings: CompareRun) -> "reports.ComparisonReport":
    """Compare several drafts on the same prompts, to find out which one suits your traffic.

    Returns:
        The acceptance length of every draft, and the relative change between every two drafts, over
        all prompts and in each category. All intervals hold together at the given confidence.

    Raises:
        DraftQuantError: a draft, the traces or a file cannot be read, or they do not have the same
            prompts.
    """
    from ...validate.runs.replay_run import compared

    return compared(settings)


_MOST_OF_A_PART = 5
"""Most rows of a category, where there are many drafts."""


def _say_files(_report: object, settings: CompareRun) -> None:
    for path in settings.files.values():
        stderr().line((str(path), "bold"), ": the comparison")


def _show(report: "ComparisonReport", _settings: object) -> None:
    out = stdout()
    rows = table(
        f"Comparison, K = {report.num_draft_tokens}, against {report.names[0]}",
        "category",
        "draft",
        "prompts",
        "acceptance length",
        "change",
        "lower bound",
        "upper bound",
        "",
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
            change = changes[place]
            shares = (change.relative_change, change.lower, change.upper) if change else ()
            cells = [f"{share:+.2%}" for share in shares] or ["", "", ""]
            rows.row(head[0], name, head[1], f"{scope.lengths[place]:.4f}", *cells, mark)
        if left := len(report.names) - len(shown):
            rows.row("", f"{left} more, see --html or --report", *("",) * 6)
    print_table(rows)
    out.line(
        f"all bounds hold together with {report.confidence:.2%} confidence; each of them alone has"
        f" {report.confidence_of_each:.2%} ({report.method})"
    )
    out.line((report.answer, "bold"))
    out.warnings(report.warnings)


def _shown(scope: "Scope", report: "ComparisonReport") -> list[int]:
    """Numbers of the drafts: all; if many, all for the whole, the first and the best for a part.

    The baseline comes first; if many, the others by their acceptance length.
    """
    if not report.is_many:
        return list(range(len(report.names)))
    ranked = scope.ranked
    return ranked if scope.is_whole else ranked[:_MOST_OF_A_PART]


COMMAND = Command(compare, _show, beside=_say_files)
