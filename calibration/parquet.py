"""pyarrow, which only parquet and Arrow files need: imported when one is read."""

from typing import Any

from .errors import PromptError


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
            where, "needs pyarrow, which is not installed", fix="pip install 'draftquant[parquet]'"
        ) from exc
    return pyarrow
