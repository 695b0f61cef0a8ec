"""Report files of `gate` and `report`: their options, checked before any work, and written last."""

import argparse
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...quantize.errors import OutputError
from ...quantize.files.command_line import recorded_argv
from ...quantize.files.report_files import ReportFormat, append_text, check_reports, write_reports
from ...recipes.errors import visible
from ..console import stderr

if TYPE_CHECKING:
    from ...validate.report.document import Document

SUMMARY = "GITHUB_STEP_SUMMARY"
"""Where GitHub Actions says which file shows Markdown on the page of a run."""
NOTHING: Mapping[Path, str] = MappingProxyType({})
_SHOWN = ("--json", "--github", "--overwrite", "--debug", "-q", "--quiet", "-v", "--verbose")
_OF_PAGES: tuple[ReportFormat, ...] = ("html", "markdown", "junit")


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """`--overwrite`."""
    parser.add_argument(
        "--overwrite", action="store_true", help="replace report files that exist already"
    )


def check_report_file(options: argparse.Namespace) -> None:
    """Check `--report` of a command that writes nothing else.

    Raises:
        OutputError: the file cannot be written.
    """
    check_reports(_asked(options, ("report",)), overwrite=options.overwrite)


def add_page_arguments(parser: argparse.ArgumentParser) -> None:
    """`--html`, `--markdown`, `--junit`, `--github` and `--overwrite`."""
    parser.add_argument(
        "--html", type=Path, metavar="F.html", help="write the report as one self-contained page"
    )
    parser.add_argument("--markdown", type=Path, metavar="F.md", help="write it for a pull request")
    parser.add_argument("--junit", type=Path, metavar="F.xml", help="write it as test cases for CI")
    parser.add_argument(
        "--junit-inconclusive",
        choices=("error", "skipped"),
        default="error",
        help="what an INCONCLUSIVE verdict is in --junit: skipped where it fails no job",
    )
    parser.add_argument(
        "--github",
        action="store_true",
        help="in a step of GitHub Actions: the Markdown in its summary, the verdict as annotation",
    )
    add_overwrite(parser)


def check_pages(options: argparse.Namespace) -> None:
    """Check all report files that are asked for.

    Raises:
        OutputError: one of them cannot be written, or no step of GitHub Actions runs.
    """
    check_reports(_asked(options, ("report", *_OF_PAGES)), overwrite=options.overwrite)
    if options.github and not os.environ.get(SUMMARY):
        raise OutputError(
            "--github",
            f"expected a step of GitHub Actions, got no ${SUMMARY}",
            fix="leave it out, or give --markdown F.md",
        )


def wants_pages(options: argparse.Namespace) -> bool:
    """Whether there is anything to write but JSON."""
    return options.github or bool(_asked(options, _OF_PAGES))


def write_pages(
    options: argparse.Namespace, document: "Document", *, beside: Mapping[Path, str] = NOTHING
) -> tuple[Path, ...]:
    """Write every report file that is asked for, all or none; then tell GitHub.

    Args:
        options: that were checked.
        document: of which they are made.
        beside: text of more files, that are written with them.

    Returns:
        What was written.
    """
    from ...validate.report.html_report import page
    from ...validate.report.junit_report import junit
    from ...validate.report.markdown_report import markdown

    asked = _asked(options, _OF_PAGES)
    writers: Mapping[str, Callable[[Document], str]]
    tests = functools.partial(junit, inconclusive=options.junit_inconclusive)
    writers = {"html": page, "markdown": markdown, "junit": tests}
    files = {**beside, **{path: writers[kind](document) for kind, path in asked.items()}}
    write_reports(files, overwrite=options.overwrite)
    if options.github:
        append_text(Path(os.environ[SUMMARY]), markdown(document) + "\n")
        stderr().line(annotation(document.judgement.verdict, document.judgement.reason))
    return tuple(files)


def asked_for(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line as a report keeps it: without places, and without how results are shown."""
    return tuple(one for one in recorded_argv(argv) if one not in _SHOWN)


def annotation(verdict: str, reason: str) -> str:
    """What GitHub Actions shows beside a run, on whichever stream it is printed."""
    level = "notice" if verdict == "PASS" else "error"
    said = visible(reason).replace("%", "%25")
    return f"::{level} title=draftquant gate%3A {verdict}::{said}"


def _asked(
    options: argparse.Namespace, kinds: tuple[ReportFormat, ...]
) -> dict[ReportFormat, Path]:
    named = {kind: getattr(options, kind, None) for kind in kinds}
    return {kind: path for kind, path in named.items() if path is not None}
