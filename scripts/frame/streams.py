"""stdout and stderr: what can be written, how wide a line is, and how much is printed."""

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


class StdoutError(Exception):
    """A result cannot be written to stdout."""


class _Results:
    """stdout, whose errors are distinguished from those of files.

    A pipe whose reader went away is no error: the rest is discarded.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        """As in a stream; raises `StdoutError` where writing fails."""
        with _named():
            return sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
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


def open_streams() -> None:
    """Make printing to stdout and stderr fail only where nothing can be written.

    Characters that the terminal's encoding lacks are escaped. A closed stream (`>&-`) would get the
    number of the next file that is opened, so it is opened again: stdout, where the result goes,
    as one that cannot be written.
    """
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def width_is_known(stream: IO[str]) -> bool:
    """Whether the width of a line is known: from a terminal, or COLUMNS."""
    return stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()


def can_redraw(stream: IO[str]) -> bool:
    """Whether an existing line can be rewritten, as bars are; a log cannot."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def discard(stream: IO[str]) -> None:
    """Discard what was printed and not written, which would fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Speech:
    """How much to print on stderr, by `-q` and `-v`, for one run of a command; and when it was."""

    quiet = False
    verbose = False
    _spoke_at = 0.0

    def spoke(self) -> None:
        self._spoke_at = time.perf_counter()

    def silence(self) -> float:
        return time.perf_counter() - self._spoke_at


SPEECH = _Speech()


def speak(*, quiet: bool, verbose: bool) -> None:
    """Print from now on only what is wrong (`quiet`), or more than usual (`verbose`)."""
    SPEECH.quiet, SPEECH.verbose = quiet, verbose and not quiet
