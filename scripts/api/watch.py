"""`Watch`: what a long run says meanwhile, and to whom."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from ...recipes.errors import DraftQuantWarning

Unit = Literal["bytes", "items", "work"]
"""What a bar counts: work has no unit that people know, and is shown as a share."""


class Bar(Protocol):
    """How far something is, phase by phase."""

    @property
    def measured(self) -> bool:
        """Whether it is known how long the phase that runs is."""

    def phase(self, label: str, total: int | None = None, unit: Unit = "items") -> None:
        """End the phase that runs and begin the next; without a total it is not known how long."""

    def advance(self, by: int = 1) -> None:
        """Move on by some items."""

    def label(self, text: str) -> None:
        """Say something else before the bar."""

    def set(self, done: int, total: int) -> None:
        """Move to `done` of `total`."""


class Watch:
    """Sees how far a run is, and shows nothing; subclasses show what they like.

    The command line shows bars and lines on stderr.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @contextmanager
    def bar(self, label: str, total: int | None, unit: Unit = "items") -> Iterator[Bar]:
        """Something of `total` items or bytes begins; None = of nobody knows how many.

        It ends with the block.
        """
        del label, total, unit
        yield _NoBar()

    def stage(self, name: str) -> None:
        """A stage of the run begins: "write", "sync", "verify"."""

    def line(self, text: str) -> None:
        """Something to show; what it quotes may hold any character."""

    def warning(self, text: str) -> None:
        """What may be wrong, in one line or more: a Python warning (`DraftQuantWarning`).

        The command line prints it on stderr instead.
        """
        warnings.warn(text, DraftQuantWarning, stacklevel=_outside())

    def note(self, text: str) -> None:
        """What is good to know, where nothing is wrong."""
        self.line(text)


def verifying(bar: Bar) -> Callable[[str], None]:
    """For `on_stage` of what writes a folder: shows that it is verified now."""

    def begin(stage: str) -> None:
        if stage == "verify":
            bar.phase("verify")

    return begin


def beyond_kept(bar: Bar) -> Callable[[int, int], None]:
    """For progress of a run that goes on with what an earlier one kept, as its first call says.

    That took no time now: the bar shows what is left to do.
    """
    kept: int | None = None

    def show(done: int, total: int) -> None:
        nonlocal kept
        kept = done if kept is None else kept
        bar.set(done - kept, total - kept)

    return show


class _NoBar:
    """Is told, and shows nothing."""

    measured = False

    def phase(self, label: str, total: int | None = None, unit: Unit = "items") -> None:
        """See `Bar.phase`."""

    def advance(self, by: int = 1) -> None:
        """See `Bar.advance`."""

    def label(self, text: str) -> None:
        """See `Bar.label`."""

    def set(self, done: int, total: int) -> None:
        """See `Bar.set`."""


def _outside() -> int:
    """Frames from `Watch.warning` up to the caller's own code, where the warning is shown."""
    package, level, frame = __name__.partition(".")[0], 2, sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level


SILENT = Watch()
