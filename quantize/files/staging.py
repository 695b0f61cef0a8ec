"""Staged output: a folder appears whole under its final name, or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..errors import OutputError
from .checkpoint import UNVERIFIED
from .staging_names import remove_stale, staging_name


def check_output(out: Path, source: Path | None = None, *, needed_bytes: int = 0) -> None:
    """Refuse an output that cannot or must not be written, before any work.

    Args:
        out: folder or file to create; its parent must exist.
        source: folder that is read; neither may contain the other.

    Raises:
        OutputError: the output exists, its parent does not, the two overlap, or the disk is full.
    """
    if out.exists() or out.is_symlink():
        raise OutputError(
            out,
            "it already exists, and is never overwritten",
            fix="give another name, or move this one away",
        )
    parent = out.absolute().parent
    if parent.exists() and not parent.is_dir():
        raise OutputError(out, f"its parent {parent} is a file", fix="give a name in a folder")
    if not parent.is_dir():
        raise OutputError(
            out, f"its parent folder {parent} does not exist", fix=f"mkdir -p {parent}"
        )
    if not os.access(parent, os.W_OK):
        raise OutputError(out, f"its parent {parent} is not writable", fix="choose another place")
    if source is not None:
        inside, outside = out.absolute().parent.resolve() / out.name, source.resolve()
        if inside.is_relative_to(outside):
            raise OutputError(
                out, f"overlaps the source {source}", fix="write it beside the source"
            )
    free = shutil.disk_usage(parent).free
    if free < needed_bytes and not os.statvfs(parent).f_blocks:  # such as /proc and /sys
        raise OutputError(
            out,
            f"{parent} is not on a disk: its file system has no space at all",
            fix="choose another place",
        )
    if free < needed_bytes:
        raise OutputError(
            out,
            f"needs {needed_bytes:,} bytes, {parent} has {free:,} free",
            fix="free some space, or write to another disk",
        )


@contextmanager
def staged_output(
    out: Path, *, last: str | None = None, check: Callable[[Path], None] = lambda _staging: None
) -> Iterator[Path]:
    """Give a staging folder beside `out`; leaving the block without an exception publishes it.

    The staging folder has a hidden name and is removed on any exception; what killed runs left of
    the same output is removed before. Everything in it must have been synced by its writer; the
    rename is atomic.

    Args:
        last: the file that makes the folder what it is; written as `last` + `UNVERIFIED`, it gets
            its name when all else is done.
        check: is asked then, with the staging folder, and raises if it is not to be published.

    Raises:
        OutputError: `out` appeared meanwhile, or writing failed (disk full, no permission).
    """
    staging = out.parent / staging_name(out.name)
    remove_stale(out.parent, out.name)
    if staging.exists():
        raise OutputError(out, "this process is already writing it", fix="wait until it is done")
    try:
        staging.mkdir()
        yield staging
        if last is not None:
            (staging / f"{last}{UNVERIFIED}").rename(staging / last)
        for folder in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
            sync(folder)
        check_output(out)
        check(staging)
        staging.rename(out)
        try:
            sync(out.parent)
        except OSError:
            out.rename(staging)  # it might be gone after a power cut: this run has failed
            raise
    except OSError as exc:
        raise OutputError(
            out,
            f"cannot be written: {exc.strerror or exc}",
            fix="free some space or choose another place; nothing was kept",
        ) from exc
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # what stays is stale: the next run removes it


@contextmanager
def _hidden_folder(beside: Path, *, of: str) -> Iterator[Path]:
    """Give a new hidden folder beside a path; it goes when the block is left.

    What killed runs left of the same name is removed before, and by `clean`; what this run cannot
    remove is stale, and goes with the next run.
    """
    folder = beside.parent / staging_name(of)
    remove_stale(beside.parent, of)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def staged_source(out: Path) -> Iterator[Path]:
    """Give a hidden folder beside `out` for what `out` is made of; it goes when the block is left.

    What killed runs left of it is removed before, and by `clean`.

    Raises:
        OutputError: it cannot be created.
    """
    made = ExitStack()
    try:
        folder = made.enter_context(_hidden_folder(out, of=f"{out.name}.source"))
    except OSError as exc:
        raise OutputError(
            out,
            f"what it is made of cannot be written beside it: {exc.strerror or exc}",
            fix="free some space or choose another place; nothing was kept",
        ) from exc
    with made:
        yield folder


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file and flush it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    sync(path)


def replace_text(path: Path, text: str) -> None:
    """Write a text file, or put it in the place of one: whole, or everything is as it was.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        with _hidden_folder(path, of=path.name) as staging:
            write_text(staging / path.name, text)
            (staging / path.name).replace(path)
            sync(path.parent)
    except OSError as exc:
        raise OutputError(
            path,
            f"cannot be written: {exc.strerror or exc}",
            fix="free some space or choose another place",
        ) from exc
