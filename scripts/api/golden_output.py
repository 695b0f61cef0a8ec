"""The file of `--golden`: checked before any work, written after it."""

from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import AnyPath

if TYPE_CHECKING:
    from ...validate.golden.golden import Golden


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
    from ...validate.golden.golden_file import golden_document

    write_reports({Path(path): golden_document(golden)}, overwrite=overwrite)
