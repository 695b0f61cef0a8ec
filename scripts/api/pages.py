"""`Pages`: the report files of `gate` and `report`, checked before any work and written last."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from ...quantize.errors import OutputError
from ...quantize.files.command_line import recorded_argv
from ...quantize.files.report_files import (
    ReportFormat,
    append_text,
    check_place,
    check_reports,
    write_reports,
)
from ...recipes.errors import visible
from .arguments import AnyPath, GoldenFile, Overwrite
from .option import Option
from .settings import Settings

if TYPE_CHECKING:
    from ...validate.judging.published import Texts
    from ...validate.measure.measurement import Measurement
    from ...validate.report.document import Document
    from ...validate.report.trend import History

SUMMARY = "GITHUB_STEP_SUMMARY"
"""Where GitHub Actions says which file shows Markdown on the page of a run."""
NOTHING: Mapping[Path, str] = MappingProxyType({})
_NO_HISTORY = (".html", ".htm", ".svg", ".png", ".md", ".xml", ".pdf")
"""Endings of pages and pictures: whoever gives one expects the history to be drawn there."""
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
    trend: Annotated[
        AnyPath | None,
        Option(
            "history of releases, one JSON line a report: 'gate' adds its own, pages draw it",
            "FILE",
        ),
    ] = None
    golden: GoldenFile = None
    overwrite: Overwrite = False
    log_to: Annotated[
        str | None,
        Option(
            "also log verdict, figures and report files to MLflow or Weights & Biases",
            "mlflow[:URI]|wandb[:PROJECT]",
        ),
    ] = None

    @property
    def wants_pages(self) -> bool:
        """Whether there is anything to do with the report but write its JSON."""
        asked = (self.golden, self.log_to)
        return self.github or bool(self._pages()) or any(one is not None for one in asked)

    def check_pages(self, report: AnyPath | None = None) -> None:
        """Check all report files that are asked for.

        Args:
            report: a file for the JSON, that is written with them.

        Raises:
            OutputError: one of them cannot be written, or no step of GitHub Actions runs.
            GateError: a line of the history is not of a report.
            TrackingError: the tracker is not known, or not installed.
        """
        from ...validate.tracking.trackers import find_tracker

        if self.log_to is not None:
            find_tracker(self.log_to)
        asked = {**given({"report": report, "golden": self.golden}), **self._pages()}
        check_reports(asked, overwrite=self.overwrite)
        if self.trend is not None:
            self._check_trend(Path(self.trend), asked)
        if self.github and not os.environ.get(SUMMARY):
            raise OutputError(
                "--github",
                f"expected a step of GitHub Actions, got no ${SUMMARY}",
                fix="leave it out, or give --markdown F.md",
            )

    def history(self, document: "Document") -> "History | None":
        """The history that is asked for, with this report in it."""
        from ...validate.report.trend import History, entry_of, read_trend

        if self.trend is None:
            return None
        path = Path(self.trend)
        return History.of(read_trend(path) if path.exists() else (), entry_of(document))

    def append_to_trend(self, document: "Document") -> None:
        """Add the report to the history that is asked for, and say where it stands."""
        from ...validate.report.trend import append_report, entry_of

        if self.trend is None:
            return
        found = append_report(Path(self.trend), entry_of(document))
        what = "this report was added" if found.is_new else "this report stands there already"
        self.listener.note(f"{self.trend}: line {found.line}: {what}")

    def write_pages(
        self,
        document: "Document",
        *,
        history: "History | None",
        beside: Mapping[Path, str] = NOTHING,
    ) -> tuple[Path, ...]:
        """Write every report file that is asked for, all or none; then tell GitHub.

        Args:
            document: of which they are made.
            history: that they show, where one is asked for.
            beside: text of more files, that are written with them.

        Returns:
            What was written.
        """
        from ...validate.report.html_report import page
        from ...validate.report.junit_report import junit
        from ...validate.report.markdown_report import markdown

        shown = functools.partial(markdown, history=history)
        writers: Mapping[str, Callable[[Document], str]] = {
            "html": functools.partial(page, history=history),
            "markdown": shown,
            "junit": functools.partial(junit, inconclusive=self.junit_inconclusive),
        }
        pages = {path: writers[kind](document) for kind, path in self._pages().items()}
        files = {**beside, **pages}
        write_reports(files, overwrite=self.overwrite)
        if self.github:
            append_text(Path(os.environ[SUMMARY]), shown(document) + "\n")
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
        from ...validate.golden.golden_file import golden_document
        from ...validate.golden.golden_sources import golden_of_measurement, golden_of_report

        if self.golden is None:
            return NOTHING
        found = golden_of_report(document) if measured is None else golden_of_measurement(measured)
        return {Path(self.golden): golden_document(found)}

    def log(self, document: "Document", files: Sequence[Path]) -> None:
        """Tell the tracker that is asked for, last of all.

        Args:
            document: of the gate.
            files: that are logged too, the JSON report first.

        Raises:
            TrackingError: it does not take the run; the verdict is in the message.
        """
        from ...validate.tracking.tracked_run import tracked_run
        from ...validate.tracking.trackers import find_tracker

        if self.log_to is not None:
            tracker = find_tracker(self.log_to)
            place = tracker.log(tracked_run(document, tuple(files)))
            self.listener.note(f"logged to {tracker.name}: {place}")

    def _check_trend(self, path: Path, others: Mapping[ReportFormat, Path]) -> None:
        from ...validate.report.trend import read_trend

        if path.absolute() in {other.absolute() for other in others.values()}:
            raise OutputError(
                path,
                "both --trend and a report name it",
                fix="give the history its own file",
            )
        if path.suffix.lower() in _NO_HISTORY:
            raise OutputError(
                path,
                "--trend keeps JSON lines in a file such as trend.jsonl; the page draws them",
                fix="name it trend.jsonl, and add --html F.html for the page",
            )
        check_place(path, overwrite=True)
        if path.exists():
            read_trend(path)

    def _pages(self) -> dict[ReportFormat, Path]:
        return given({"html": self.html, "markdown": self.markdown, "junit": self.junit})


def texts_of(text: str, history: "History | None" = None) -> "Texts":
    """What makes the files of a report, of the text of its JSON and the history that it shows."""
    return {
        "report": functools.partial(str, text),
        "html": functools.partial(_html, text, history),
        "markdown": functools.partial(_markdown, text, history),
        "junit": functools.partial(_junit, text),
    }


def _html(text: str, history: "History | None") -> str:
    from ...validate.report.document import parse_report
    from ...validate.report.html_report import page

    return page(parse_report(text, "gate"), history=history)


def _markdown(text: str, history: "History | None") -> str:
    from ...validate.report.document import parse_report
    from ...validate.report.markdown_report import markdown

    return markdown(parse_report(text, "gate"), history=history)


def _junit(text: str, inconclusive: Literal["error", "skipped"] = "error") -> str:
    from ...validate.report.document import parse_report
    from ...validate.report.junit_report import junit

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
