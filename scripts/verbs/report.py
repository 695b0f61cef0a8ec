"""`report`: what `gate --report` wrote as a page, as Markdown, as JUnit."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typing_extensions import override

from ...recipes.regular_file import AnyPath, read_text
from ...validate.judging.published import Published
from ..frame.console import print_document, print_json, stderr
from ..frame.pages import Pages, texts_of
from ..frame.settings import Argument
from ..frame.verb import verb

if TYPE_CHECKING:
    from ...validate.report.document import Document


@dataclass(frozen=True, slots=True)
class ReportSettings(Pages):
    """Of which report, and into which files; without any the command prints Markdown."""

    gate: Annotated[AnyPath, Argument("JSON report, written by 'gate --report'", "G.json")]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WrittenReport(Published):
    """A report of the gate that was read, and the files that were written of it.

    Attributes:
        document: the report.
        written: the files.
    """

    document: "Document"
    written: tuple[Path, ...]

    @override
    def brief(self) -> Mapping[str, object]:
        return {**self.document.brief(), "written": ", ".join(map(str, self.written))}


@verb(ReportSettings)
def report(settings: ReportSettings) -> WrittenReport:
    """Write a report of the gate as a page, as Markdown, or as JUnit.

    Returns:
        The report that was read, and the files that were written.

    Raises:
        DraftQuantError: the file is not a report of the gate, or a file cannot be written; then no
            file is written.
    """
    from ...validate.report.document import read_report

    settings.check_pages()
    document = read_report(Path(settings.gate))
    written = settings.write_pages(document, beside=settings.golden_file(document))
    found = WrittenReport(document=document, written=written)
    return found.with_texts(texts_of(read_text(Path(settings.gate))))


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
