"""Progress on stderr, phase by phase: how much, how fast, how long it still takes.

A terminal shows a bar. A log gets a line when a phase ends, one about every tenth of a phase that
takes long, and one of a phase whose end nobody knows, such as a toolkit that is loaded.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from ..recipes.errors import visible
from .terminal import SPEECH, can_redraw, stderr_stream, terminal

Unit = Literal["bytes", "items"]
PATIENCE = 5.0
"""Seconds after which a log hears of a phase that goes on."""
SHORT = 1.0
"""Seconds of a phase that no log needs to hear of."""


class Bar:
    """The phases of one run, one after the other; `advance` is safe to call often."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task("", total=None)
        self._console = terminal(stderr_stream()) if progress is None else progress.console
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._label, self._total, self._done = "", 0, 0
        self._unit: Unit = "items"
        self._since = self._said_at = time.perf_counter()

    def phase(self, label: str, total: int | None = None, unit: Unit = "items") -> None:
        """End the phase that runs and begin the next; without a total it is not known how long."""
        self.end()
        with self._lock:
            self._label, self._unit, self._total, self._done = label, unit, total or 0, 0
            self._since = self._said_at = time.perf_counter()
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, total=total, description=visible(label), unit=unit)
        elif total is None:
            self._timer = threading.Timer(SHORT, self._say, [f"{label} ..."])
            self._timer.daemon = True
            self._timer.start()

    def advance(self, by: int = 1) -> None:
        """Move on by some items or bytes."""
        with self._lock:
            self._done += by
            done = self._done
        self.set(done, self._total)

    def label(self, text: str) -> None:
        """Say something else before the bar."""
        self._label = text
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=visible(text))

    def set(self, done: int, total: int) -> None:
        """Move to `done` of `total`."""
        with self._lock:
            self._done, self._total = done, total
            now = time.perf_counter()
            tell = now - self._said_at >= max(PATIENCE, (now - self._since) / 10)
            if tell:
                self._said_at = now
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)
        elif tell and 0 < done < total:
            spent = time.perf_counter() - self._since
            left = spent / done * (total - done)
            self._say(f"{self._label}: {done / total:.0%} of {self._amount(total)},"
                      f" {self._speed(spent)}, {seconds(left)} left")  # fmt: skip

    @property
    def measured(self) -> bool:
        """Whether it is known how long the phase that runs is."""
        return self._total > 0

    def end(self) -> None:
        """End the phase that runs: a log hears how long it took, a terminal with `--verbose`."""
        label, self._label = self._label, ""
        self.stop()
        if not label or (self._progress is not None and not SPEECH.verbose):
            return
        spent = time.perf_counter() - self._since
        if spent < SHORT and not SPEECH.verbose:
            return
        if self._done:
            amount = f"{self._amount(self._done)} in {seconds(spent)}, {self._speed(spent)}"
            self._say(f"{label}: {amount}")
        else:
            self._say(f"{label}: {seconds(spent)}")

    def stop(self) -> None:
        """Say no more of the phase that runs."""
        if self._timer is not None:
            self._timer.cancel()

    def _amount(self, count: int) -> str:
        return f"{count / 1e6:,.1f} MB" if self._unit == "bytes" else f"{count:,}"

    def _speed(self, spent: float) -> str:
        return speed(self._done / max(spent, 1e-9), self._unit)

    def _say(self, text: str) -> None:
        if not SPEECH.quiet:
            self._console.print(Text(visible(text)), soft_wrap=True)


class Figures(ProgressColumn):
    """How much, how fast, how long it still takes."""

    def render(self, task: Task) -> Text:
        """The figures of a phase, those that are known."""
        if task.total is None:
            return Text(seconds(task.elapsed or 0))
        unit: Unit = task.fields.get("unit", "items")
        done, total = int(task.completed), int(task.total)
        parts = [f"{done:,} of {total:,}"]
        if unit == "bytes":
            parts = [f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"]
        if task.speed:
            parts.append(speed(task.speed, unit))
        if task.time_remaining is not None and not task.finished:
            parts.append(f"{seconds(task.time_remaining)} left")
        return Text(", ".join(parts))


@contextmanager
def progress_bar(label: str, total: int | None, unit: Unit = "items") -> Iterator[Bar]:
    """Progress on stderr, whose first phase begins."""
    stream = stderr_stream()
    if SPEECH.quiet or not can_redraw(stream):
        bar = Bar(None)
        bar.phase(label, total, unit)
        try:
            yield bar
            bar.end()
        finally:
            bar.stop()
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), Figures()
    with Progress(*columns, console=terminal(stream), transient=True) as progress:
        bar = Bar(progress)
        bar.phase(label, total, unit)
        yield bar
        bar.end()


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
