"""Terminal output: results on stdout (tables, or JSON for machines), progress on stderr.

All of it passes here, and nothing else prints. Text is never read as markup, and what is not
printable is escaped, line ends too: names, configs and errors quote files that anybody may have
written. Our own styles are given beside the text: `out.line(("GOOD", "bold green"), ": verified")`.
"""

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..recipes.errors import visible
from .api.watch import Watch

_PIPED_WIDTH = 160  # a pipe has no width: wide enough for every table of ours
Part = str | tuple[str, str]
"""Text, or text and its style."""


class Output:
    """Where lines and tables go: stdout or stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, *parts: Part, style: str = "") -> None:
        """Print one line, whatever its parts hold; a terminal wraps it."""
        pairs = ((part, "") if isinstance(part, str) else part for part in parts)
        text = Text.assemble(*((visible(text), look) for text, look in pairs), style=style)
        self._console.print(text, soft_wrap=True)

    def table(self, found: "ResultTable") -> None:
        """Print a table below its title; rich would wrap a title to the width of the table."""
        self.line(found.heading, style="bold")
        self._console.print(found)

    def rule(self, title: str) -> None:
        """Print a line across with a title in it."""
        self._console.rule(Text(visible(title)))


class ResultTable(Table):
    """A table in the house look, whose cells are one line each."""

    def __init__(self, heading: str, *columns: str, right: tuple[str, ...] = ()) -> None:
        super().__init__(header_style="bold")
        self.heading = heading
        for column in columns:
            self.add_column(
                Text(visible(column)),
                justify="right" if column in right else "left",
                overflow="fold",
            )

    def row(self, *cells: str, style: str = "") -> None:
        """Add a row."""
        self.add_row(*(Text(visible(cell)) for cell in cells), style=style)


def stdout() -> Output:
    """For results."""
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    file = cast(IO[str], RESULTS)
    return Output(_Console(file=file, width=width, highlight=False, markup=False, emoji=False))


def stderr() -> Output:
    """For progress and errors."""
    return Output(_Console(stderr=True, highlight=False, markup=False, emoji=False))


def print_json(value: Any) -> None:
    """Print a result for machines; in ASCII, which no terminal takes for a command."""
    RESULTS.write(json.dumps(value, indent=2).replace("\x7f", r"\u007f") + "\n")


def print_error(exc: BaseException) -> None:
    """Print an error, its own lines as lines."""
    first, *rest = str(exc).split("\n") if str(exc) else [type(exc).__name__]
    stderr().line(("error:", "bold red"), f" {first}")
    for line in rest:
        stderr().line(line)


def print_document(text: str) -> None:
    """Print text of ours that has lines of its own, such as YAML."""
    for line in text.splitlines():
        RESULTS.write(visible(line) + "\n")


def table(heading: str, *columns: str, right: tuple[str, ...] = ()) -> ResultTable:
    """An empty table; columns named in `right` are aligned to the right."""
    return ResultTable(heading, *columns, right=right)


def print_table(found: ResultTable) -> None:
    """Print a table on stdout."""
    stdout().table(found)


def open_streams() -> None:
    """Make stdout and stderr such that printing fails only where nothing can be written.

    Characters that the terminal's encoding lacks are escaped. A stream that is closed (`>&-`) takes
    the next file that is opened for itself, so it is opened again: stdout, where the result goes,
    as one that cannot be written.
    """
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Throw away what was printed and not written, which would fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class StdoutError(Exception):
    """A result cannot be written to stdout."""


class _Results:
    """stdout, whose errors are told from those of files; a pipe without reader is none of them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        """As of a stream.

        Raises:
            StdoutError: it cannot be written.
        """
        with _named():
            return sys.stdout.write(text)

    def flush(self) -> None:
        """As of a stream; raises as `write` does."""
        with _named():
            sys.stdout.flush()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as exc:
        discard_stdout()
        raise StdoutError(exc.strerror or str(exc)) from exc


RESULTS = _Results()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave the BrokenPipeError to `main`, which is quiet about it; rich would exit."""
        raise


class Bar:
    """One progress bar; `advance` is safe to call often."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=total)

    def advance(self, by: int = 1) -> None:
        """Move on by some items."""
        self._progress.advance(self._task, by)

    def label(self, text: str) -> None:
        """Say something else before the bar."""
        self._progress.update(self._task, description=text)

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
    console = _Console(stderr=True)
    quiet = not console.is_terminal  # a log wants no bars
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        yield Bar(progress, label, total)


class OnTerminal(Watch):
    """Bars and lines of a run on stderr."""

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Bar]:
        """See `progress_bar`."""
        with progress_bar(label, total) as bar:
            yield bar

    def line(self, text: str) -> None:
        """See `Output.line`."""
        stderr().line(text)


def megabytes(nbytes: int) -> str:
    """Bytes as decimal megabytes, for tables."""
    return f"{nbytes / 1e6:,.2f} MB"
