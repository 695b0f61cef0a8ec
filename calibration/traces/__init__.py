"""Traces (what a target did on prompts): the format, its files, and checks of their contents."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...recipes.errors import CheckpointError, DraftQuantError


@contextmanager
def files_raise(kind: type[DraftQuantError], fix: str | None = None) -> Iterator[None]:
    """Turn what is wrong with a file that is read inside the block into an error of this kind."""
    try:
        yield
    except CheckpointError as exc:
        raise kind(exc.where, exc.what, fix=exc.fix if fix is None else fix) from exc
