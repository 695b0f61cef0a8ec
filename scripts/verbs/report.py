"""`report`: what `gate --report` wrote as a page, as Markdown, as JUnit."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ...validate.runs.judging_asked import ReportRun
from ..frame import reports
from ..frame.arguments import PAGES
from ..frame.console import print_document, print_json, stderr
from ..frame.settings import Argument, Settings
from ..frame.verb import verb


@dataclass(frozen=True)
class ReportSettings(Settings, ReportRun):
    """Of which report, and into which files; without any the command prints Markdown."""

    options: ClassVar = {
        **PAGES,
        "gate": Argument("JSON report, written by 'gate --report'", "G.json"),
    }


@verb(ReportSettings)
def report(settings: ReportSettings) -> "reports.WrittenReport":
    """Write a report of the gate as a page, as Markdown, or as JUnit.

    Returns:
        The report that was read, and the files that were written.

    Raises:
        DraftQuantError: the file is not a report of the gate, or a file cannot be written; then no
            file is written.
    """
    from ...validate.runs.report_pages import written_report

    return written_report(settings)


# ---- `draftquant report`: the gate's JSON as a page, as Markdown, as JUnit

VERB = report
EPILOG = "exit codes: 0 whatever the verdict is, 2 bad input"


def run(options: argparse.Namespace) -> int:
    """Write the files; without one print Markdown."""
    from ...validate.report.report_texts import markdown

    found = report.run(options.settings)
    judgement, written = found.document.judgement, [str(path) for path in found.written]
    if options.json:
        print_json({"verdict": judgement.verdict, "reason": judgement.reason, "written": written})
    elif not options.settings.wants_pages:
        print_document(markdown(found.document))
    for path in written:
        stderr().line((path, "bold"), f": {judgement.verdict}")
    return 0
