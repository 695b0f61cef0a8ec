"""`report`: what `gate --report` wrote as a page, as Markdown, as JUnit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from . import reports
from .arguments import AnyPath
from .option import Argument
from .pages import Pages
from .verb import verb


@dataclass(frozen=True, slots=True)
class ReportSettings(Pages):
    """Of which report, and into which files; without any the command prints Markdown."""

    gate: Annotated[AnyPath, Argument("JSON report, written by 'gate --report'", "G.json")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReport:
    """What the gate found, and the files that were written of it."""

    document: "reports.Document"
    written: tuple[Path, ...]


@verb(ReportSettings)
def report(settings: ReportSettings) -> WrittenReport:
    """Write the gate's JSON as a page, as Markdown, as JUnit.

    Returns:
        What the gate found, and the files that were written of it.

    Raises:
        DraftQuantError: it is no report of the gate, or a file cannot be written; then none is.
            Or the tracker does not take it; then they are.
    """
    from ...validate.report.document import read_report

    settings.check_pages()
    document = read_report(Path(settings.gate))
    written = settings.write_pages(document)
    settings.log(document, (Path(settings.gate), *written))
    return WrittenReport(document=document, written=written)
