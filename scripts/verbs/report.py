"""`report`: what `gate --report` wrote as a page, as Markdown, as JUnit."""

from typing import Any

from ...validate.runs.judging_asked import ReportRun
from ..frame import reports
from ..frame.console import print_document, stderr
from ..frame.verb import Command, verb


@verb(ReportRun)
def report(settings: ReportRun) -> "reports.WrittenReport":
    """Write a report of the gate as a page, as Markdown, or as JUnit.

    Returns:
        The report that was read, and the files that were written.

    Raises:
        DraftQuantError: the file is not a report of the gate, or a file cannot be written; then no
            file is written.
    """
    from ...validate.runs.report_pages import written_report

    return written_report(settings)


def _mapping(pages: "reports.WrittenReport", _settings: object) -> dict[str, Any]:
    judgement, written = pages.document.judgement, [str(path) for path in pages.written]
    return {"verdict": judgement.verdict, "reason": judgement.reason, "written": written}


def _show(pages: "reports.WrittenReport", settings: ReportRun) -> None:
    """Without a file to write, Markdown."""
    from ...validate.report.report_texts import markdown

    if not settings.wants_pages:
        print_document(markdown(pages.document))


def _say_files(pages: "reports.WrittenReport", _settings: object) -> None:
    for path in pages.written:
        stderr().line((str(path), "bold"), f": {pages.document.judgement.verdict}")


COMMAND = Command(report, _show, _mapping, beside=_say_files)
