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
from rich.text import Text

from ..recipes.errors import visible
from .api.listener import Listener, Unit
from .progress import Bar, progress_bar
from .tables import ResultTable
from .terminal import SPEECH, discard, speak, terminal, width_is_known

__all__ = ["Bar", "Output", "ResultTable", "progress_bar", "speak"]

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
