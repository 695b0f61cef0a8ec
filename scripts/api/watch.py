"""`Watch`: what a long run says meanwhile, and to whom."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Bar(Protocol):
    """How far something is."""

    def advance(self, by: int = 1) -> None:
        """Move on by some items."""

    def label(self, text: str) -> None:
        """Say something else before the bar."""

    def set(self, done: int, total: int) -> None:
        """Move to `done` of `total`."""


class Watch:
    """Sees how far a run is, and shows nothing; subclasses show what they like.

    The command line shows bars and lines on stderr.
    """

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Bar]:
        """Something of `total` items begins; it ends with the block."""
        del label, total
        yield _NoBar()

    def line(self, text: str) -> None:
        """A sentence, such as a warning; what it quotes may hold any character."""


class _NoBar:
    def advance(self, by: int = 1) -> None:
        pass

    def label(self, text: str) -> None:
        pass

    def set(self, done: int, total: int) -> None:
        pass


SILENT = Watch()
