"""Terminal output: results on stdout (tables, or JSON for machines), progress on stderr."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_PIPED_WIDTH = 160  # a pipe has no width: wide enough for every table of ours


def stdout() -> Console:
    """The console for results."""
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)


def stderr() -> Console:
    """The console for progress and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a result for machines."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the house look; columns named in `right` are aligned to the right."""
    found = Table(title=title, header_style="bold")
    for column in columns:
        found.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return found


def print_table(found: Table) -> None:
    """Print a table below its title; rich would wrap a title to the width of the table."""
    console = stdout()
    console.print(str(found.title), style="bold", soft_wrap=True, markup=False)
    found.title = None
    console.print(found)


class Bar:
    """One progress bar; `advance` is safe to call often."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=total)

    def advance(self, by: int = 1) -> None:
        """Move on by some items."""
        self._progress.advance(self._task, by)

    def set(self, done: int, total: int) -> None:
        """Move to `done` of `total`."""
        self._progress.update(self._task, completed=done, total=total)


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Bar]:
    """A progress bar on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = stderr()
    quiet = not console.is_terminal  # a log wants no bars
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        yield Bar(progress, label, total)


def megabytes(nbytes: int) -> str:
    """Bytes as decimal megabytes, for tables."""
    return f"{nbytes / 1e6:,.2f} MB"
