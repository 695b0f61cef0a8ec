"""`Ears`: hears what a run says on its way to who listens, and keeps the warnings of it."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from typing_extensions import override

from .listener import Bar, Listener, Unit

ReportT = TypeVar("ReportT")


class Ears(Listener):
    """Passes everything on to another listener, and keeps the warnings.

    Args:
        listener: who listens.
        words: puts a text into the words of who called; None = as it is.

    Attributes:
        warnings: all that were said, each once.
    """

    def __init__(self, listener: Listener, words: Callable[[str], str] | None = None) -> None:
        self._listener = listener
        self._words = words
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
        self._listener.line(self._said(text))

    @override
    def warning(self, text: str) -> None:
        said = self._said(text)
        if said not in self.warnings:
            self.warnings += (said,)
            self._listener.warning(said)

    @override
    def note(self, text: str) -> None:
        self._listener.note(self._said(text))

    def _said(self, text: str) -> str:
        return text if self._words is None else self._words(text)


def with_warnings(report: ReportT, warnings: Sequence[str]) -> ReportT:
    """A report that holds what was warned of, where it has a place for it and none in it."""
    if not warnings or getattr(report, "warnings", None) != ():
        return report
    if dataclasses.is_dataclass(report) and not isinstance(report, type):
        has_field = "warnings" in {each.name for each in dataclasses.fields(report)}
        return dataclasses.replace(report, warnings=tuple(warnings)) if has_field else report
    report.warnings = tuple(warnings)  # type: ignore[attr-defined] # of an opened folder
    return report
