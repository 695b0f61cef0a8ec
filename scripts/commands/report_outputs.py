"""Report files of commands whose arguments are not yet the settings of a verb."""

import argparse
from typing import TYPE_CHECKING

from ...quantize.files.report_files import check_reports
from ..api.pages import asked_for as asked_for
from ..api.pages import given

if TYPE_CHECKING:
    pass


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
    check_reports(given({"report": options.report}), overwrite=options.overwrite)
