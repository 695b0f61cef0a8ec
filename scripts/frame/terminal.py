"""Lines and tables drawn by rich: text is never read as markup, names stay whole at any width.

A table that is too wide is folded between words, then dispensable columns are left out,
and where words still do not fit side by side, its rows are written one below the other.
"""

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table
from rich.text import Text

from ...recipes.errors import visible
from .streams import discard

_PIPED_WIDTH = 160  # a pipe has no width: wide enough for most tables of draftquant
_BORDERS = 3
"""Characters that each column needs besides its cells; the table has one more."""
Part = str | tuple[str, str]
"""Text, or text and its style."""


class _Terminal(Console):
    """One of the two streams; text is never read as markup."""

    def __init__(self, stream: IO[str], width: int | None = None) -> None:
        # NO_COLOR: rich keeps bold and dim, we keep nothing.
        colours: Any = None if os.environ.get("NO_COLOR") else "auto"
        super().__init__(
            file=stream, width=width, color_system=colours, highlight=False, markup=False,
            emoji=False,
        )  # fmt: skip

    def on_broken_pipe(self) -> None:
        """A reader that went away has seen enough; rich would exit."""
        discard(self.file)


def terminal(stream: IO[str], width: int | None = None) -> Console:
    """A console for a stream, `width` columns wide if given.

    NO_COLOR removes every style, FORCE_COLOR keeps styles in a pipe, COLUMNS is the width.
    """
    return _Terminal(stream, width)


class TerminalOutput:
    """The destination of lines and tables: stdout or stderr."""

    def __init__(self, stream: IO[str], *, width_is_known: bool = True) -> None:
        self._width_is_known = width_is_known
        self._console = terminal(stream, None if width_is_known else _PIPED_WIDTH)

    def line(self, *parts: Part) -> None:
        """Print one line, whatever its parts hold; a terminal wraps it."""
        pairs = ((part, "") if isinstance(part, str) else part for part in parts)
        text = Text.assemble(*((visible(text), look) for text, look in pairs))
        self._console.print(text, soft_wrap=True)

    def warnings(self, texts: Iterable[str]) -> None:
        """Print one warning per line."""
        for text in texts:
            self.line(("warning:", "yellow"), f" {text}")

    def table(self, table: "ResultTable") -> None:
        """Print a table below its title; rich would wrap a title to the width of the table."""
        self.line((table.heading, "bold"))
        if not self._width_is_known:
            self._console.width = max(_PIPED_WIDTH, table.least_width)
        self._console.print(table)


class ResultTable:
    """A table in the house look: columns of numbers are aligned to the right.

    Args:
        heading: printed above it.
        columns: their titles.
        spare: those of them that a narrow terminal leaves out, the first one first.
    """

    def __init__(self, heading: str, *columns: str, spare: tuple[str, ...] = ()) -> None:
        self.heading = heading
        self._columns = tuple(map(visible, columns))
        self._spare = spare
        self._rows: list[tuple[str, ...]] = []

    def row(self, *cells: str) -> None:
        """Add a row."""
        self._rows.append(tuple(map(visible, cells)))

    @property
    def least_width(self) -> int:
        """Characters of a line in which all columns fit."""
        shown = range(len(self._columns))
        return sum(self._longest_words(shown)) + _BORDERS * len(self._columns) + 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Side by side where words fit, otherwise one below the other."""
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
        return [self._columns[index], *(cells[index] for cells in self._rows)]

    def _has_numbers(self, index: int) -> bool:
        """Whether every cell that is not empty begins as a number does."""
        return all(cells[index][:1] in "+-0123456789" for cells in self._rows)

    def _longest_words(self, shown: Sequence[int]) -> list[int]:
        """Least characters of each column; a number and its unit are one word."""
        lengths = []
        for index in shown:
            heading, *cells = self._cells(index)
            whole = self._has_numbers(index)
            parts = [part for cell in cells for part in ((cell,) if whole else cell.split())]
            lengths.append(max(map(cell_len, [*heading.split(), *parts]), default=0))
        return lengths

    def _widths(self, shown: Sequence[int], available: int) -> list[int] | None:
        """Characters of each column; None = not even words fit."""
        least = self._longest_words(shown)
        widths = [max(map(cell_len, self._cells(index))) for index in shown]
        room = available - _BORDERS * len(widths) - 1
        if sum(least) > room:
            return None
        while sum(widths) > room:  # the widest foldable one gives way
            widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            widths[widest] -= 1
        return widths

    def _table(self, shown: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table(header_style="bold")
        for index, width in zip(shown, widths, strict=True):
            justify: JustifyMethod = "right" if self._has_numbers(index) else "left"
            table.add_column(Text(self._columns[index]), width=width, justify=justify)
        for cells in self._rows:
            table.add_row(*(Text(cells[index]) for index in shown))
        return table

    def _stacked(self, available: int) -> Iterator[Text]:
        """A row as a block: its first cell, and below it the other columns."""
        label = max(map(cell_len, self._columns[1:]), default=0)
        for first, *others in self._rows:
            yield Text(first or "-", style="bold", overflow="fold")
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
