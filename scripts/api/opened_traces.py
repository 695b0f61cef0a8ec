"""Traces that a verb computes on: opened, and said how their hidden states are stored."""

from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import AnyPath
from .listener import Listener

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder


def open_traces(folder: AnyPath, listener: Listener) -> "TraceFolder":
    """Open a trace folder; where its hidden states are not stored as they are, say how.

    Raises:
        TraceError: it is no whole, consistent trace folder.
    """
    traces, warnings = open_with_warnings(folder, listener)
    for warning in warnings:
        listener.warning(warning)
    return traces


def open_with_warnings(
    folder: AnyPath, listener: Listener
) -> "tuple[TraceFolder, tuple[str, ...]]":
    """The same for a verb whose report holds the warnings.

    Rounded hidden states are one: every figure is then that of a draft with rounded inputs.
    """
    from ...calibration.traces.trace_folder import TraceFolder

    traces = TraceFolder.open(Path(folder))
    storage = traces.manifest.features.storage
    warnings: tuple[str, ...] = ()
    if storage == "fp8-per-token":
        warnings = (
            f"the hidden states of {folder} were rounded to FP8, with a scale for each position:"
            " figures are those of a draft that reads rounded hidden states",
        )
    elif storage == "zstd":
        listener.note(f"the hidden states of {folder} are packed by zstd, without loss")
    return traces, warnings
