"""Terminal output: results on stdout (tables, or JSON for machines), progress on stderr.

All output goes through this module. Text is never read as markup, and unprintable characters
are escaped, even line ends: names, configs and errors quote files that anybody may have
written. Our own styles are given beside the text: `out.line(("GOOD", "bold green"), ": verified")`.
rich is imported when something is printed.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

from typing_extensions import override

from ...recipes.errors import visible
from ...recipes.listener import Listener, Unit
from .streams import RESULTS, SPEECH, width_is_known

if TYPE_CHECKING:
    from .progress import PhaseBar
    from .terminal import Part, ResultTable, TerminalOutput


def stdout() -> "TerminalOutput":
    """The output for results."""
    from .terminal import TerminalOutput

    return TerminalOutput(cast(IO[str], RESULTS), width_is_known=width_is_known(sys.stdout))


def stderr() -> "TerminalOutput":
    """The output for warnings and errors; asking for it counts as speaking."""
    from .terminal import TerminalOutput

    SPEECH.spoke()
    return TerminalOutput(sys.stderr)


def note(*parts: "Part") -> None:
    """Print on stderr what is good to know; not with `--quiet`."""
    if not SPEECH.quiet:
        stderr().line(*parts)


def print_json(value: Any) -> None:
    """Print a result for machines; in ASCII, which no terminal interprets as a command."""
    RESULTS.write(json.dumps(value, indent=2, default=os.fspath).replace("\x7f", r"\u007f") + "\n")


def print_error(exc: BaseException, *, as_json: bool = False) -> None:
    """Print an error on stderr, with its own line ends; for machines on stdout too."""
    first, *rest = str(exc).split("\n") if str(exc) else [type(exc).__name__]
    stderr().line(("error:", "bold red"), f" {first}")
    for line in rest:
        stderr().line(line)
    if as_json:
        keys = ("where", "what", "fix", "details", *(["ids"] if getattr(exc, "ids", ()) else []))
        print_json({"error": {key: getattr(exc, key, "") for key in keys}})


def print_document(text: str) -> None:
    """Print our own text that has several lines, such as YAML."""
    for line in text.splitlines():
        RESULTS.write(visible(line) + "\n")


def table(heading: str, *columns: str, spare: tuple[str, ...] = ()) -> "ResultTable":
    """An empty table; see `ResultTable`."""
    from .terminal import ResultTable

    return ResultTable(heading, *columns, spare=spare)


def print_table(shown: "ResultTable") -> None:
    """Print a table on stdout."""
    stdout().table(shown)


class OnTerminal(Listener):
    """Bars and lines of a run on stderr; `spent` has the seconds of each stage that ended."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._stage = ""
        self._since = time.perf_counter()

    @override
    @contextmanager
    def bar(self, label: str, total: int | None, unit: Unit = "items") -> "Iterator[PhaseBar]":
        from .progress import progress_bar

        with progress_bar(label, total, unit) as bar:
            yield bar

    @override
    def stage(self, name: str) -> None:
        now = time.perf_counter()
        if self._stage:
            self.spent[self._stage] = self.spent.get(self._stage, 0) + now - self._since
        self._stage, self._since = name, now

    @override
    def line(self, text: str) -> None:
        stderr().line(text)

    @override
    def warning(self, text: str) -> None:
        for line in f"warning: {text}".split("\n"):
            stderr().line(line)

    @override
    def note(self, text: str) -> None:
        note(text)


def megabytes(nbytes: int) -> str:
    """Bytes as decimal megabytes, for tables."""
    return f"{nbytes / 1e6:,.2f} MB"
