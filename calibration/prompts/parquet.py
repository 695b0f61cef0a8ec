"""Parquet files, and pyarrow, which only they and Arrow files need: imported when one is read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...recipes.install_line import install_line
from ...recipes.regular_file import open_stream
from ..errors import PromptError

_ROWS = 256  # read at a time
MAX_GROUP_BYTES = 2**30
"""Of one row group unpacked. All of SPEED-Bench's longest prompts together have a tenth."""


def import_pyarrow(where: object) -> Any:
    """The package `pyarrow`, with its parquet and IPC readers.

    Args:
        where: the file that needs it, for the error.

    Raises:
        PromptError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as exc:
        raise PromptError(
            where, "reading it needs pyarrow, which is not installed", fix=install_line("parquet")
        ) from exc
    return pyarrow


def parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Every row of a parquet file with its number, from 1; without the columns that are null in it.

    Raises:
        PromptError: pyarrow is not installed, or the file cannot be read.
    """
    pyarrow = import_pyarrow(path)

    def wrong(what: str) -> PromptError:
        return PromptError(path, what, fix="give a parquet file with one prompt per row")

    number = 0
    try:
        with open_stream(path) as stream:
            file = pyarrow.parquet.ParquetFile(stream)
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            if any(group.total_byte_size > MAX_GROUP_BYTES for group in groups):
                raise wrong(f"it has a row group of more than {MAX_GROUP_BYTES:,} bytes")
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {key: value for key, value in row.items() if value is not None}
    except (OSError, ValueError, pyarrow.ArrowException) as exc:
        raise wrong(f"cannot be read: {str(exc).splitlines()[0] if str(exc) else exc!r}") from exc
