"""stdout and stderr as they are: what can be written, how wide a line is, and how much is said."""

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
    """stdout, whose errors are told from those of files.

    A pipe whose reader went away has no error: what is left is thrown away.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        """As of a stream; raises `StdoutError` where it cannot be written."""
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


def width_is_known(stream: IO[str]) -> bool:
    """Whether somebody said how wide a line may be: a terminal, or COLUMNS."""
    return stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()


def can_redraw(stream: IO[str]) -> bool:
    """Whether a line that is there can be written anew, as bars are; a log cannot."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def discard(stream: IO[str]) -> None:
    """Throw away what was printed and not written, which would fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Speech:
    """How much is said on stderr, by `-q` and `-v`, for one run of the command; and when it was."""

    quiet = False
    verbose = False
    _spoke_at = 0.0

    def spoke(self) -> None:
        """Something is said now."""
        self._spoke_at = time.perf_counter()

    def silence(self) -> float:
        """Seconds since something was said."""
        return time.perf_counter() - self._spoke_at


SPEECH = _Speech()


def speak(*, quiet: bool, verbose: bool) -> None:
    """Say from now on only what is wrong (`quiet`), or more than usual (`verbose`)."""
    SPEECH.quiet, SPEECH.verbose = quiet, verbose and not quiet
