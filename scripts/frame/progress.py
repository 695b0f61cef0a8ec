"""Progress on stderr, phase by phase: how much is done, how fast, and how much time is left.

A terminal shows a bar. A log gets a line when a phase ends, and lines in between: the longer a
phase runs, the fewer, but at least one every 30 seconds while anything runs (`heartbeat`), even
inside one long item.
"""

import html
import importlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text
from typing_extensions import override

from ...recipes.errors import visible
from ...recipes.listener import Bar, Unit
from .streams import SPEECH, can_redraw
from .terminal import terminal

PATIENCE = 5.0
"""Seconds after which a log reports a phase that continues."""
EVERY = 25.0
"""Seconds of silence after which a log gets a line: below 30, however busy the machine is."""
SHORT = 1.0
"""Duration in seconds of a phase too short for a log."""


@dataclass(slots=True)
class Phase:
    """One phase of a run, and its clock: how much of it is done, and since when it runs."""

    label: str
    total: int = 0
    unit: Unit = "items"
    since: float = field(default_factory=lambda: time.perf_counter())
    done: int = 0
    moved_at: float = 0.0

    def move(self, done: int, total: int) -> None:
        """Set how much of `total` is done."""
        self.done, self.total, self.moved_at = done, total, time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the phase began."""
        return time.perf_counter() - self.since

    @property
    def left(self) -> float | None:
        """Estimated seconds until it ends, by the pace so far; None = no estimate yet."""
        if self.done < 0.01 * self.total:
            return None  # the pace of less means nothing
        pace = (self.moved_at - self.since) / self.done
        left = pace * (self.total - self.done) - (time.perf_counter() - self.moved_at)
        return left if left > 0 else None  # the next item takes longer than earlier ones

    def so_far(self) -> str:
        """How far it is, for a log."""
        if not self.total:
            return f"{self.label}: running for {seconds(self.spent)}"
        amount = "" if self.unit == "work" else f" of {amount_of(self.total, self.unit)}"
        text = f"{self.label}: {self.done / self.total:.0%}{amount} after {seconds(self.spent)}"
        return text if self.left is None else f"{text}, about {seconds(self.left)} left"

    def result(self) -> str:
        """How long it took, for a log."""
        if not self.done or self.unit == "work":
            return f"{self.label}: done in {seconds(self.spent)}"
        pace = speed(self.done / max(self.spent, 1e-9), self.unit)
        return f"{self.label}: {amount_of(self.done, self.unit)} in {seconds(self.spent)}, {pace}"


class PhaseBar(Bar):
    """The phases of one run, one after the other; `advance` is safe to call often."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._console = terminal(sys.stderr) if progress is None else progress.console
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.now = Phase("")
        self._task = None if progress is None else progress.add_task("", total=None, phase=self.now)

    @override
    def phase(self, label: str, total: int | None = None, unit: Unit = "items") -> None:
        self.end()
        with self._lock:
            self.now = Phase(label, total or 0, unit)
        if self._progress is not None and self._task is not None:
            self._progress.reset(
                self._task, total=total, description=visible(label), phase=self.now
            )
        elif total is None:
            self._timer = threading.Timer(SHORT, self._say, [f"{label} ..."])
            self._timer.daemon = True
            self._timer.start()

    @override
    def advance(self, by: int = 1) -> None:
        with self._lock:
            done = self.now.done + by
            self.now.move(done, self.now.total)
        self._show()

    @override
    def label(self, text: str) -> None:
        self.now.label = text
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=visible(text))

    @override
    def set(self, done: int, total: int) -> None:
        with self._lock:
            self.now.move(done, total)
        self._show()

    def _show(self) -> None:
        now = self.now
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=now.done, total=now.total)
        elif 0 < now.done < now.total and now.spent >= PATIENCE:
            self.beat(min(max(PATIENCE, now.spent / 10), EVERY))

    def beat(self, patience: float | None = None) -> None:
        """Report progress to a log, unless something was printed less than `patience` ago."""
        with self._lock:
            silent = SPEECH.silence() >= (EVERY if patience is None else patience)
            tell = bool(self.now.label) and silent
            if tell:
                SPEECH.spoke()
        if tell:
            self._say(self.now.so_far())

    @property
    @override
    def measured(self) -> bool:
        return self.now.total > 0

    def end(self) -> None:
        """End the current phase: a log reports how long it took, a terminal with `--verbose`."""
        with self._lock:
            ended, self.now = self.now, Phase("")
        self.stop()
        if not ended.label or (self._progress is not None and not SPEECH.verbose):
            return
        if ended.spent >= SHORT or SPEECH.verbose:
            self._say(ended.result())

    def stop(self) -> None:
        """Print no more about the current phase."""
        if self._timer is not None:
            self._timer.cancel()

    def _say(self, text: str) -> None:
        SPEECH.spoke()
        if not SPEECH.quiet:
            self._console.print(Text(visible(text)), soft_wrap=True)


class ProgressFigures(ProgressColumn):
    """How much is done, how fast, and how much time is left."""

    def render(self, task: Task) -> Text:
        """The figures of a phase that are known."""
        phase: Phase = task.fields["phase"]
        if not phase.total:
            return Text(seconds(task.elapsed or 0))
        parts = [f"{phase.done / phase.total:.0%}"]
        if phase.unit != "work":
            parts = [f"{amount_of(phase.done, phase.unit)} of {amount_of(phase.total, phase.unit)}"]
        if phase.unit != "work" and phase.done:
            parts.append(speed(phase.done / max(phase.moved_at - phase.since, 1e-9), phase.unit))
        if phase.left is not None:
            parts.append(f"{seconds(phase.left)} left")
        return Text(", ".join(parts))


@contextmanager
def progress_bar(label: str, total: int | None, unit: Unit = "items") -> Iterator[PhaseBar]:
    """Progress on stderr; begins the first phase."""
    stream = sys.stderr
    if SPEECH.quiet or not can_redraw(stream):
        bar = PhaseBar(None)
        bar.phase(label, total, unit)
        _IN_LOGS.append(bar)
        try:
            yield bar
            bar.end()
        finally:
            _IN_LOGS.remove(bar)
            bar.stop()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        ProgressFigures(),
    )
    with Progress(*columns, console=terminal(stream), transient=True) as progress:
        bar = PhaseBar(progress)
        bar.phase(label, total, unit)
        yield bar
        bar.end()


_IN_LOGS: list[PhaseBar] = []
"""Bars that a log reports, the innermost last."""


@contextmanager
def heartbeat(name: str) -> Iterator[None]:
    """Tell a log at least every 30 seconds that `name` still runs, and how far it is.

    A terminal does not need it: its bar moves. Nothing is printed after the block.
    """
    if SPEECH.quiet or can_redraw(sys.stderr):
        yield
        return
    whole, over = PhaseBar(None), threading.Event()
    whole.now = Phase(name)
    SPEECH.spoke()

    def beats() -> None:
        while not over.wait(max(EVERY - SPEECH.silence(), SHORT / 10)):
            bars = [whole, *_IN_LOGS]
            next(bar for bar in reversed(bars) if bar.now.label).beat()

    thread = threading.Thread(target=beats, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


DRAWN_EVERY = 0.2
"""Seconds between two drawings: a kernel sends each of them to the browser."""


class _Cell(Progress):
    """Draws itself as an element of HTML in the output of the cell that runs."""

    def __init__(self) -> None:
        super().__init__(disable=True)  # rich would want ipywidgets
        self._display: Any = importlib.import_module("IPython.display")
        self._handle = self._display.display(self._display.HTML(""), display_id=True)
        self._drawn_at = 0.0

    @override
    def reset(self, *args: Any, **kwargs: Any) -> None:
        super().reset(*args, **kwargs)
        self.draw()

    @override
    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        if time.monotonic() - self._drawn_at >= DRAWN_EVERY:
            self.draw()

    def draw(self) -> None:
        self._drawn_at = time.monotonic()
        (task,) = self.tasks
        share = "" if task.total is None else f' value="{task.completed:g}" max="{task.total:g}"'
        words = html.escape(f"{visible(task.description)} {ProgressFigures().render(task).plain}")
        self._handle.update(
            self._display.HTML(f"<progress{share}></progress> <small>{words}</small>")
        )


@contextmanager
def cell_bar(label: str, total: int | None, unit: Unit = "items") -> Iterator[PhaseBar]:
    """Progress in the output of a cell; begins the first phase."""
    cell = _Cell()
    bar = PhaseBar(cell)
    bar.phase(label, total, unit)
    yield bar
    cell.draw()
    bar.end()


def amount_of(count: int, unit: Unit) -> str:
    """Megabytes or items."""
    return f"{count / 1e6:,.1f} MB" if unit == "bytes" else f"{count:,}"


def speed(per_second: float, unit: Unit) -> str:
    """Bytes or items per second."""
    if unit == "bytes":
        return f"{per_second / 1e6:,.0f} MB/s"
    return f"{per_second:,.1f}/s" if per_second >= 1 else f"{1 / per_second:,.1f} s each"


def seconds(count: float) -> str:
    """A duration as people say it: 0.4 s, 12 s, 3 min 20 s, 2 h 05 min."""
    if count < 10:
        return f"{count:.1f} s"
    whole = math.ceil(count)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
