"""The terminal as the user set it up: colours, width, whether it can move its cursor."""

import os
import sys
import time
from typing import IO, Any

from rich.console import Console


class _Terminal(Console):
    """One of the two streams; text is never read as markup."""

    def __init__(self, stream: IO[str], width: int | None = None) -> None:
        # NO_COLOR: rich leaves bold and dim, here nothing is left.
        colours: Any = None if os.environ.get("NO_COLOR") else "auto"
        super().__init__(
            file=stream, width=width, color_system=colours, highlight=False, markup=False,
            emoji=False,
        )  # fmt: skip

    def on_broken_pipe(self) -> None:
        """A reader that went away has seen enough; rich would exit."""
        discard(self.file)


def terminal(stream: IO[str], width: int | None = None) -> Console:
    """How text gets onto a stream, `width` columns wide if it says so.

    NO_COLOR leaves out every style, FORCE_COLOR keeps them in a pipe, COLUMNS is the width.
    """
    return _Terminal(stream, width)


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


def stderr_stream() -> IO[str]:
    """What is stderr now: tests and shells put others in its place."""
    return sys.stderr
