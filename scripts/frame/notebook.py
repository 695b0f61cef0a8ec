"""A bar in the output of a notebook's cell.

Its phases, clock and words are those of the command line; a notebook draws them another way, in one
element of HTML that is replaced.
"""

import html
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import Progress
from typing_extensions import override

from ...recipes.errors import visible
from .progress import Bar, Figures, Unit

EVERY = 0.2
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
        if time.monotonic() - self._drawn_at >= EVERY:
            self.draw()

    def draw(self) -> None:
        """How far it is now."""
        self._drawn_at = time.monotonic()
        (task,) = self.tasks
        share = "" if task.total is None else f' value="{task.completed:g}" max="{task.total:g}"'
        words = html.escape(f"{visible(task.description)} {Figures().render(task).plain}")
        self._handle.update(
            self._display.HTML(f"<progress{share}></progress> <small>{words}</small>")
        )


@contextmanager
def cell_bar(label: str, total: int | None, unit: Unit = "items") -> Iterator[Bar]:
    """Progress in the output of a cell, whose first phase begins."""
    cell = _Cell()
    bar = Bar(cell)
    bar.phase(label, total, unit)
    yield bar
    cell.draw()
    bar.end()
