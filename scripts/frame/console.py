"""Terminal output: results on stdout (tables, or JSON for machines), progress on stderr.

All of it passes here, and nothing else prints. Text is never read as markup, and what is not
printable is escaped, line ends too: names, configs and errors quote files that anybody may have
written. Our own styles are given beside the text: `out.line(("GOOD", "bold green"), ": verified")`.
"""

import io
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table
from rich.text import Text

from ...recipes.errors import visible
from ...recipes.listener import Listener, Unit
from .progress import SPEECH, Bar, discard, progress_bar, terminal, width_is_known

# ---- Tables of results: names stay whole at any width
#
# A table that is too wide is folded between words, then columns are left out that it can do
# without,
# and where words do not fit beside each other even so, its rows are written one below the other.

_BORDERS = 3
"""Characters that each column has beside its cells; the table has one more."""


class ResultTable:
    """A table in the house look.

    Args:
        heading: printed above it.
        columns: their titles.
        right: of these, the ones aligned to the right.
        spare: of these, what a narrow terminal does without, the first one first.
    """

    def __init__(
        self,
        heading: str,
        *columns: str,
        right: tuple[str, ...] = (),
        spare: tuple[str, ...] = (),
    ) -> None:
        self.heading = heading
        self._columns = tuple(map(visible, columns))
        self._right, self._spare = right, spare
        self._rows: list[tuple[tuple[str, ...], str]] = []
        self._sections: set[int] = set()

    def row(self, *cells: str, style: str = "") -> None:
        """Add a row."""
        self._rows.append((tuple(visible(cell) for cell in cells), style))

    def add_section(self) -> None:
        """Draw a line below the last row."""
        self._sections.add(len(self._rows))

    @property
    def least_width(self) -> int:
        """Characters of a line in which all columns fit."""
        shown = range(len(self._columns))
        return sum(self._longest_words(shown)) + _BORDERS * len(self._columns) + 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Side by side where words fit, else one below the other."""
        del console
        shown = list(range(len(self._columns)))
        for left_out in (None, *map(self._columns.index, self._spare)):
            shown = [index for index in shown if index != left_out]
            widths = self._widths(shown, options.max_width)
            if widths is not None:
                yield self._table(shown, widths)
                if len(shown) < len(self._columns):
                    names = ", ".join(self._spare[: len(self._columns) - len(shown)])
                    yield Text(f"a wider terminal, or --json, also shows: {names}")
                return
        yield from self._stacked(options.max_width)

    def _cells(self, index: int) -> list[str]:
        return [self._columns[index], *(cells[index] for cells, _ in self._rows)]

    def _longest_words(self, shown: Sequence[int]) -> list[int]:
        """Characters that no column may go below; a number and its unit are one word."""
        found = []
        for index in shown:
            heading, *cells = self._cells(index)
            whole = self._columns[index] in self._right
            parts = [part for cell in cells for part in ((cell,) if whole else cell.split())]
            found.append(max(map(cell_len, [*heading.split(), *parts]), default=0))
        return found

    def _widths(self, shown: Sequence[int], available: int) -> list[int] | None:
        """Characters of each column; None = not even words fit."""
        least = self._longest_words(shown)
        widths = [max(map(cell_len, self._cells(index))) for index in shown]
        room = available - _BORDERS * len(widths) - 1
        if sum(least) > room:
            return None
        while sum(widths) > room:  # the widest of those that can be folded gives way
            widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            widths[widest] -= 1
        return widths

    def _table(self, shown: Sequence[int], widths: Sequence[int]) -> Table:
        found = Table(header_style="bold")
        for index, width in zip(shown, widths, strict=True):
            name = self._columns[index]
            justify: JustifyMethod = "right" if name in self._right else "left"
            found.add_column(Text(name), width=width, justify=justify)
        for number, (cells, style) in enumerate(self._rows):
            if number in self._sections:
                found.add_section()
            found.add_row(*(Text(cells[index]) for index in shown), style=style)
        return found

    def _stacked(self, available: int) -> Iterator[Text]:
        """A row as a block: its first cell, and below it what the other columns say."""
        label = max(map(cell_len, self._columns[1:]), default=0)
        for (first, *others), style in self._rows:
            yield Text(first or "-", style=f"bold {style}".strip(), overflow="fold")
            for column, cell in zip(self._columns[1:], others, strict=True):
                if cell:
                    folded = textwrap.wrap(
                        cell,
                        max(available - label - 4, 20),
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                    for number, part in enumerate(folded):
                        beside = "" if number else column
                        yield Text(f"  {beside:<{label}}  {part}", overflow="fold")


_PIPED_WIDTH = 160  # a pipe has no width: wide enough for most tables of ours
Part = str | tuple[str, str]
"""Text, or text and its style."""


class Output:
    """Where lines and tables go: stdout or stderr."""

    def __init__(self, console: Console, *, width_is_known: bool = True) -> None:
        self._console = console
        self._width_is_known = width_is_known

    def line(self, *parts: Part, style: str = "") -> None:
        """Print one line, whatever its parts hold; a terminal wraps it."""
        pairs = ((part, "") if isinstance(part, str) else part for part in parts)
        text = Text.assemble(*((visible(text), look) for text, look in pairs), style=style)
        self._console.print(text, soft_wrap=True)

    def table(self, found: "ResultTable") -> None:
        """Print a table below its title; rich would wrap a title to the width of the table."""
        self.line(found.heading, style="bold")
        if not self._width_is_known:
            self._console.width = max(_PIPED_WIDTH, found.least_width)
        self._console.print(found)

    def rule(self, title: str) -> None:
        """Print a line across with a title in it."""
        self._console.rule(Text(visible(title)))


def stdout() -> Output:
    """For results."""
    known = width_is_known(sys.stdout)
    width = None if known else _PIPED_WIDTH
    return Output(terminal(cast(IO[str], RESULTS), width), width_is_known=known)


def stderr() -> Output:
    """For warnings and errors; who asks for it says something."""
    SPEECH.spoke()
    return Output(terminal(sys.stderr))


def note(*parts: Part) -> None:
    """Say on stderr what is good to know; not with `--quiet`."""
    if not SPEECH.quiet:
        stderr().line(*parts)


def detail(*parts: Part) -> None:
    """Say on stderr what only `--verbose` asks for."""
    if SPEECH.verbose:
        stderr().line(*parts)


def print_json(value: Any) -> None:
    """Print a result for machines; in ASCII, which no terminal takes for a command."""
    RESULTS.write(json.dumps(value, indent=2).replace("\x7f", r"\u007f") + "\n")


def print_error(exc: BaseException, *, as_json: bool = False) -> None:
    """Print an error on stderr, its own lines as lines; for machines on stdout too."""
    first, *rest = str(exc).split("\n") if str(exc) else [type(exc).__name__]
    stderr().line(("error:", "bold red"), f" {first}")
    for line in rest:
        stderr().line(line)
    if as_json:
        keys = ("where", "what", "fix", "details")
        print_json({"error": {key: getattr(exc, key, "") for key in keys}})


def print_document(text: str) -> None:
    """Print text of ours that has lines of its own, such as YAML."""
    for line in text.splitlines():
        RESULTS.write(visible(line) + "\n")


def table(
    heading: str, *columns: str, right: tuple[str, ...] = (), spare: tuple[str, ...] = ()
) -> ResultTable:
    """An empty table; see `ResultTable`."""
    return ResultTable(heading, *columns, right=right, spare=spare)


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


class StdoutError(Exception):
    """A result cannot be written to stdout."""


class _Results:
    """stdout, whose errors are told from those of files.

    A pipe whose reader went away has no error: what is left is thrown away.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        """As of a stream.

        Raises:
            StdoutError: it cannot be written.
        """
        with _named():
            return sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        """As of a stream; raises as `write` does."""
        with _named():
            sys.stdout.flush()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as exc:
        discard(sys.stdout)
        raise StdoutError(exc.strerror or str(exc)) from exc


RESULTS = _Results()


class OnTerminal(Listener):
    """Bars and lines of a run on stderr."""

    @contextmanager
    def bar(self, label: str, total: int | None, unit: Unit = "items") -> Iterator[Bar]:
        """See `progress_bar`."""
        with progress_bar(label, total, unit) as bar:
            yield bar

    def line(self, text: str) -> None:
        """See `Output.line`."""
        stderr().line(text)

    def warning(self, text: str) -> None:
        """Print it on stderr, line by line."""
        for line in f"warning: {text}".split("\n"):
            stderr().line(line)

    def note(self, text: str) -> None:
        """See `note`."""
        note(text)


def megabytes(nbytes: int) -> str:
    """Bytes as decimal megabytes, for tables."""
    return f"{nbytes / 1e6:,.2f} MB"
