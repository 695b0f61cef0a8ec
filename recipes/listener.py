"""`Listener`: what a long run reports while it works, and to whom."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from typing_extensions import override

from .errors import DraftQuantWarning

Unit = Literal["bytes", "items", "work"]
"""What a bar counts: "work" has no unit that people know, and is shown as a share."""
LOG = logging.getLogger("draftquant")
LOG.addHandler(logging.NullHandler())  # as libraries do: whoever wants to see it configures logging


Progress = Callable[[int, int], None]
"""Called with what is done, and with the total."""


def unseen(done: int, total: int) -> None:
    """The `Progress` that shows nothing."""


class Bar(Protocol):
    """The progress of a run, phase by phase."""

    @property
    def measured(self) -> bool:
        """Whether the total of the current phase is known."""

    def phase(self, label: str, total: int | None = None, unit: Unit = "items") -> None:
        """End the current phase and begin the next; without a total, its length is not known."""

    def advance(self, by: int = 1) -> None:
        """Move on by some items."""

    def label(self, text: str) -> None:
        """Change the text before the bar."""

    def set(self, done: int, total: int) -> None:
        """Move to `done` of `total`."""


class Listener:
    """Hears how far a run is, and shows no bar; subclasses show what they like.

    Messages of a run go to `logging.getLogger("draftquant")`: notes and lines at level INFO, the
    beginning of stages at level DEBUG. A warning is a Python warning
    (`DraftQuantWarning`). The command line prints all of that on stderr instead.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @contextmanager
    def bar(self, label: str, total: int | None, unit: Unit = "items") -> Iterator[Bar]:
        """Begin `total` items or bytes (None = unknown), to the end of the `with` block."""
        bar = _NoBar()
        bar.phase(label, total, unit)
        yield bar

    def stage(self, name: str) -> None:
        """A stage of the run begins: "start", "measure", "write", "sync", "verify"."""
        LOG.debug("%s", name)

    def line(self, text: str) -> None:
        """A line to show; text that it quotes may hold any character."""
        LOG.info("%s", text)

    def warning(self, text: str) -> None:
        """Warn of something that may be wrong, in one line or more."""
        warnings.warn(text, DraftQuantWarning, stacklevel=_outside())

    def note(self, text: str) -> None:
        """Say something that is good to know, where nothing is wrong."""
        self.line(text)


def verifying(bar: Bar) -> Callable[[str], None]:
    """An `on_stage` for a function that writes a folder: the bar shows when it verifies."""

    def begin(stage: str) -> None:
        if stage == "verify":
            bar.phase("verify")

    return begin


def beyond_kept(bar: Bar, own: int = 0) -> Progress:
    """Progress of a run that resumes what an earlier one kept; the first call says how much.

    Kept work took no time now: the bar shows what is left. `own` of the first call are not kept.
    """
    kept: int | None = None

    def show(done: int, total: int) -> None:
        nonlocal kept
        kept = done - own if kept is None else kept
        bar.set(done - kept, total - kept)

    return show


class _NoBar(Bar):
    """Shows nothing; the log hears of each phase that begins."""

    measured = False

    @override
    def phase(self, label: str, total: int | None = None, unit: Unit = "items") -> None:
        LOG.debug("%s", label if total is None else f"{label}: {total:,} {unit}")

    @override
    def advance(self, by: int = 1) -> None: ...

    @override
    def label(self, text: str) -> None: ...

    @override
    def set(self, done: int, total: int) -> None: ...


def _outside() -> int:
    """Frames from `Listener.warning` up to the caller's code, where Python shows the warning."""
    package, level, frame = __name__.partition(".")[0], 2, sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level


SILENT = Listener()


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What a caller asks of a run, and who hears of it. Subclasses are frozen dataclasses."""

    listener: Listener = SILENT

    def check(self) -> None:
        """Refuse settings that do not belong together; by default there is nothing to refuse."""
