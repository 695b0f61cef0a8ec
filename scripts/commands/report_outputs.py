"""Report files of commands whose arguments are not yet the settings of a verb."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.pages import NOTHING, Pages
from ..api.pages import asked_for as asked_for
from ..console import OnTerminal

if TYPE_CHECKING:
    from ...validate.report.document import Document


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """`--overwrite`."""
    parser.add_argument(
        "--overwrite", action="store_true", help="replace report files that exist already"
    )


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
    """See `Pages.check_pages`."""
    _pages(options).check_pages(options.report)


def wants_pages(options: argparse.Namespace) -> bool:
    """See `Pages.wants_pages`."""
    return _pages(options).wants_pages


def write_pages(
    options: argparse.Namespace, document: "Document", *, beside: Mapping[Path, str] = NOTHING
) -> tuple[Path, ...]:
    """See `Pages.write_pages`."""
    return _pages(options).write_pages(document, beside=beside)


def _pages(options: argparse.Namespace) -> Pages:
    names = ("html", "markdown", "junit", "junit_inconclusive", "github", "overwrite")
    return Pages(**{name: getattr(options, name) for name in names}, watch=OnTerminal())
