"""Report files: what a command writes beside its result. All of them appear, or none does."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ...recipes.errors import OutputError
from ...recipes.regular_file import open_kept
from .staging import remove_stale, staging_name, sync, write_text

ReportFormat = Literal["report", "html", "markdown", "junit", "plot", "golden", "profile"]
"""As the command line names the options."""

ENDINGS: Mapping[ReportFormat, tuple[str, ...]] = {
    "report": (".json",), "html": (".html", ".htm"), "markdown": (".md", ".markdown"),
    "junit": (".xml",), "plot": (".svg",), "golden": (".json",),
    "profile": (".json",),
}  # fmt: skip
"""Endings of file names for each format, the usual one first."""

_NEW, _OLD = "new", "old"  # in the staging folder beside a report


def check_reports(asked: Mapping[ReportFormat, Path], *, overwrite: bool = False) -> None:
    """Refuse report files that cannot or must not be written, before any work."""
    places: dict[Path, ReportFormat] = {}
    for kind, path in asked.items():
        if path.suffix.lower() not in ENDINGS[kind]:
            expected, got = " or ".join(ENDINGS[kind]), path.suffix or "none"
            what = f"--{kind}: expected a name ending in {expected}, got {got}"
            fix = f"for example {path.stem or 'gate'}{ENDINGS[kind][0]}"
            raise OutputError(path, what, fix=fix)
        place = path.parent.resolve() / path.name
        if place in places:
            what = f"both --{places[place]} and --{kind} name this file"
            raise OutputError(path, what, fix="give each report a file of its own")
        places[place] = kind
        check_place(path, overwrite=overwrite)


def write_reports(documents: Mapping[Path, str], *, overwrite: bool = False) -> None:
    """Write report files; on any error everything is restored."""
    staged = {path: path.parent / staging_name(path.name) for path in documents}
    touched: list[Path] = []
    try:
        for path, text in documents.items():
            remove_stale(path.parent, path.name)
            staged[path].mkdir()
            write_text(staged[path] / _NEW, text)
        for path in documents:
            check_place(path, overwrite=overwrite)
            if path.exists():
                shutil.copy2(path, staged[path] / _OLD)
            touched.append(path)
            (staged[path] / _NEW).replace(path)
        for folder in {path.parent for path in documents}:
            sync(folder)
    except BaseException as exc:
        for path in touched:
            if (old := staged[path] / _OLD).exists():
                old.replace(path)
            else:
                path.unlink(missing_ok=True)
        if not isinstance(exc, OSError):
            raise
        what = f"the report file cannot be written: {exc.strerror or exc}"
        fix = "free some space or choose another place; no report was written"
        raise OutputError(exc.filename or next(iter(documents)), what, fix=fix) from exc
    finally:
        for folder in staged.values():
            shutil.rmtree(folder, ignore_errors=True)


def append_text(path: Path, text: str) -> None:
    """Append to a file that other programs write too, such as a log; creates it if needed."""
    try:
        descriptor = open_kept(path)
        try:
            rest = memoryview(text.encode())
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
    except OSError as exc:
        what = f"cannot be appended to: {exc.strerror or exc}"
        raise OutputError(path, what, fix="give a file of your own") from exc


def check_place(path: Path, *, overwrite: bool) -> None:
    """Refuse a path where no file can be written, or where one must not be replaced."""
    parent, exists = path.absolute().parent, path.exists() or path.is_symlink()
    if not parent.is_dir():
        what = f"the folder of this report file, {parent}, does not exist"
        raise OutputError(path, what, fix=f"mkdir -p {parent}")
    if not os.access(parent, os.W_OK):
        what = f"the folder of this report file, {parent}, is not writable"
        raise OutputError(path, what, fix="choose another place")
    if exists and (path.is_symlink() or not path.is_file()):
        what = "expected a file, got a folder, a link or a device"
        raise OutputError(path, what, fix="give another name")
    if exists and not overwrite:
        fix = "pass --overwrite to replace it, or give another name"
        raise OutputError(path, "this report file already exists", fix=fix)
