"""Who listens to a verb: warnings are kept for its report."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from typing_extensions import override

from ...recipes.listener import SILENT, Bar, Listener, Unit

ReportT = TypeVar("ReportT")


class Ears(Listener):
    """Passes everything on, and keeps the warnings, each once."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.warnings: tuple[str, ...] = ()

    @override
    @contextmanager
    def bar(self, label: str, total: int | None, unit: Unit = "items") -> Iterator[Bar]:
        with self._listener.bar(label, total, unit) as bar:
            yield bar

    @override
    def stage(self, name: str) -> None:
        self._listener.stage(name)

    @override
    def line(self, text: str) -> None:
        self._listener.line(text)

    @override
    def warning(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings += (text,)
            self._listener.warning(text)

    @override
    def note(self, text: str) -> None:
        self._listener.note(text)


def with_warnings(report: ReportT, warnings: Sequence[str]) -> ReportT:
    """A report with the warnings of its run, where it has an empty field for them."""
    if not warnings or getattr(report, "warnings", None) != ():
        return report
    if dataclasses.is_dataclass(report) and not isinstance(report, type):
        has_field = "warnings" in {each.name for each in dataclasses.fields(report)}
        return dataclasses.replace(report, warnings=tuple(warnings)) if has_field else report
    report.warnings = tuple(warnings)  # type: ignore[attr-defined] # of an opened folder
    return report


class ProgressListener(Listener):
    """Shows a bar of what runs: in the output of a notebook's cell, elsewhere on stderr.

    Notebooks have it by default. In a script: `dq.replay(..., listener=dq.ProgressListener())`.
    """

    @override
    @contextmanager
    def bar(self, label: str, total: int | None, unit: Unit = "items") -> Iterator[Bar]:
        """Begin something of `total` items or bytes, and show its progress in a bar."""
        if in_notebook():
            from .progress import cell_bar as shown
        else:
            from .progress import progress_bar as shown
        with shown(label, total, unit) as bar:
            yield bar


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; does not import IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(each.__name__ == "ZMQInteractiveShell" for each in type(shell).__mro__)


def usual_listener() -> Listener:
    """The listener where none is given: a bar in a notebook, otherwise only the log."""
    return ProgressListener() if in_notebook() else SILENT
