"""`report`: what `gate --report` wrote as a page, as Markdown, as JUnit."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...validate.errors import GateError
from . import reports
from .arguments import AnyPath
from .option import Argument
from .pages import Pages
from .verb import verb

if TYPE_CHECKING:
    from ...validate.report.trend import History


@dataclass(frozen=True, slots=True)
class ReportSettings(Pages):
    """Of which report, and into which files; without any the command prints Markdown."""

    gate: Annotated[AnyPath, Argument("what 'gate --report' wrote", "G.json")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReport:
    """What the gate found, with the history that was asked for, and the files that were written."""

    document: "reports.Document"
    history: "History | None"
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
    if settings.trend is not None and not Path(settings.trend).exists():
        raise GateError(
            settings.trend, "no such history", fix="give what 'gate --trend' wrote, or leave it out"
        )
    history = settings.history(document)
    written = settings.write_pages(document)
    settings.log(document, (Path(settings.gate), *written))
    return WrittenReport(document=document, history=history, written=written)
