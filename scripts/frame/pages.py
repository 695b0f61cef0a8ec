"""`Pages`: the report files of `gate` and `report`, checked before any work and written last."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from ...quantize.files.hub import recorded_argv
from ...quantize.files.report_files import ReportFormat, append_text, check_reports, write_reports
from ...recipes.errors import OutputError, visible
from ...recipes.regular_file import AnyPath
from .arguments import GoldenFile, Overwrite
from .settings import Option, Settings

if TYPE_CHECKING:
    from ...validate.golden.golden_acceptance import Golden
    from ...validate.judging.published import Texts
    from ...validate.measure.measurement import Measurement
    from ...validate.report.document import Document

SUMMARY = "GITHUB_STEP_SUMMARY"
"""Where GitHub Actions says which file shows Markdown on the page of a run."""
NOTHING: Mapping[Path, str] = MappingProxyType({})
_SHOWN = ("--json", "--github", "--overwrite", "--debug", "-q", "--quiet", "-v", "--verbose")


@dataclass(frozen=True, kw_only=True)
class Pages(Settings):
    """Which report files a verb writes for people and for CI, beside its result."""

    html: Annotated[
        AnyPath | None, Option("write the report as a self-contained HTML page", "F.html")
    ] = None
    markdown: Annotated[
        AnyPath | None, Option("write the report as Markdown, for a pull request", "F.md")
    ] = None
    junit: Annotated[
        AnyPath | None, Option("write the report as JUnit test cases, for CI", "F.xml")
    ] = None
    junit_inconclusive: Annotated[
        Literal["error", "skipped"],
        Option(
            "what an INCONCLUSIVE verdict is in --junit: 'skipped' if it does not fail your job"
            " (--github then warns)"
        ),
    ] = "error"
    github: Annotated[
        bool,
        Option(
            "in GitHub Actions: add the Markdown to the step's summary and the "
            "verdict as an annotation"
        ),
    ] = False
    golden: GoldenFile = None
    overwrite: Overwrite = False

    @property
    def wants_pages(self) -> bool:
        """Whether there is anything to do with the report but write its JSON."""
        return self.github or bool(self._pages()) or self.golden is not None

    def check_pages(self, report: AnyPath | None = None) -> None:
        """Check all report files that are asked for.

        Args:
            report: a file for the JSON, that is written with them.

        Raises:
            OutputError: one of them cannot be written, or no step of GitHub Actions runs.
        """
        asked = {**given({"report": report, "golden": self.golden}), **self._pages()}
        check_reports(asked, overwrite=self.overwrite)
        if self.github and not os.environ.get(SUMMARY):
            raise OutputError(
                "--github",
                f"expected a step of GitHub Actions, got no ${SUMMARY}",
                fix="leave it out, or give --markdown F.md",
            )

    def write_pages(
        self, document: "Document", *, beside: Mapping[Path, str] = NOTHING
    ) -> tuple[Path, ...]:
        """Write every report file that is asked for, all or none; then tell GitHub.

        Args:
            document: of which they are made.
            beside: text of more files, that are written with them.

        Returns:
            What was written.
        """
        from ...validate.report.html_report import page
        from ...validate.report.report_texts import junit, markdown

        writers: Mapping[str, Callable[[Document], str]] = {
            "html": page,
            "markdown": markdown,
            "junit": functools.partial(junit, inconclusive=self.junit_inconclusive),
        }
        pages = {path: writers[kind](document) for kind, path in self._pages().items()}
        files = {**beside, **pages}
        write_reports(files, overwrite=self.overwrite)
        if self.github:
            append_text(Path(os.environ[SUMMARY]), markdown(document) + "\n")
            fails = self.junit_inconclusive == "error"
            said = document.judgement
            self.listener.line(annotation(said.verdict, said.reason, inconclusive_fails=fails))
        return tuple(files)

    def golden_file(
        self, document: "Document", measured: "Measurement | None" = None
    ) -> Mapping[Path, str]:
        """Golden acceptance of the candidate where it is asked for, beside the other files.

        Args:
            document: the report.
            measured: of the candidate's server, whose verify steps the report keeps weighted.

        Raises:
            GoldenError: no verify step was counted, or the report keeps them weighted.
        """
        from ...validate.golden.golden_acceptance import golden_document
        from ...validate.golden.golden_sources import golden_of_measurement, golden_of_report

        if self.golden is None:
            return NOTHING
        found = golden_of_report(document) if measured is None else golden_of_measurement(measured)
        return {Path(self.golden): golden_document(found)}

    def _pages(self) -> dict[ReportFormat, Path]:
        return given({"html": self.html, "markdown": self.markdown, "junit": self.junit})


def texts_of(text: str) -> "Texts":
    """What makes the files of a report, of the text of its JSON."""
    return {
        "report": functools.partial(str, text),
        "html": functools.partial(_html, text),
        "markdown": functools.partial(_markdown, text),
        "junit": functools.partial(_junit, text),
    }


def _html(text: str) -> str:
    from ...validate.report.document import parse_report
    from ...validate.report.html_report import page

    return page(parse_report(text, "gate"))


def _markdown(text: str) -> str:
    from ...validate.report.document import parse_report
    from ...validate.report.report_texts import markdown

    return markdown(parse_report(text, "gate"))


def _junit(text: str, inconclusive: Literal["error", "skipped"] = "error") -> str:
    from ...validate.report.document import parse_report
    from ...validate.report.report_texts import junit

    return junit(parse_report(text, "gate"), inconclusive=inconclusive)


def given(files: Mapping[ReportFormat, AnyPath | None]) -> dict[ReportFormat, Path]:
    """The report files that are asked for."""
    return {kind: Path(path) for kind, path in files.items() if path is not None}


def asked_for(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line as a report keeps it: without places, and without how results are shown."""
    return tuple(one for one in recorded_argv(argv) if one not in _SHOWN)


def annotation(verdict: str, reason: str, *, inconclusive_fails: bool = True) -> str:
    """What GitHub Actions shows beside a run, on whichever stream it is printed."""
    level = "notice" if verdict == "PASS" else "error"
    if verdict == "INCONCLUSIVE" and not inconclusive_fails:
        level = "warning"
    said = visible(reason).replace("%", "%25")
    return f"::{level} title=draftquant gate%3A {verdict}::{said}"


# ---- The file of `--golden`: checked before any work, written after it


def check_golden(path: AnyPath | None, *, overwrite: bool) -> None:
    """Refuse a place where it cannot be written.

    Raises:
        OutputError: see `check_reports`.
    """
    from ...quantize.files.report_files import check_reports

    if path is not None:
        check_reports({"golden": Path(path)}, overwrite=overwrite)


def write_golden(path: AnyPath, golden: "Golden", *, overwrite: bool) -> None:
    """Write it.

    Raises:
        OutputError: see `write_reports`.
    """
    from ...quantize.files.report_files import write_reports
    from ...validate.golden.golden_acceptance import golden_document

    write_reports({Path(path): golden_document(golden)}, overwrite=overwrite)
