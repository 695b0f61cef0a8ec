"""Staged output: a folder appears whole under its final name, or not at all."""

import contextlib
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ...recipes.errors import OutputError
from .checkpoint import UNVERIFIED

# The name of a staging folder says whose it is: `.OUT.PID-START-PLACE.staging`. START is when the
# process began, since process numbers are reused; PLACE identifies the machine and the namespace of
# its process numbers, so that containers and machines that share a disk never take each other's
# live runs for dead ones.

_NAME = re.compile(
    r"\.(?P<out>.+)\.(?P<pid>\d{1,7})-(?P<start>\d+)-(?P<place>[0-9a-f]{12})\.staging", re.DOTALL
)
_HOUR = 3600.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """One staging folder; its process runs or ran here or elsewhere, as far as is known."""

    path: Path
    out: str
    is_here: bool
    is_live: bool

    @property
    def nbytes(self) -> int:
        """Size of its files in bytes."""
        return sum(status.st_size for status in self._files())

    def why_left(self, older_than: float | None) -> str | None:
        """Why it must stay, if it must; after `older_than` hours runs elsewhere count as dead."""
        if self.is_here:
            return "its run is alive" if self.is_live else None
        changes = [self.path.lstat().st_mtime, *(status.st_mtime for status in self._files())]
        hours = (time.time() - max(changes)) / _HOUR
        if older_than is None or hours <= older_than:
            return f"of another machine or container, last changed {hours:.1f} hours ago"
        return None

    def _files(self) -> Iterator[os.stat_result]:
        for parent, _, files in os.walk(self.path):
            for file in files:
                yield Path(parent, file).lstat()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CleanReport(Brief):
    """What happened to unfinished folders: bytes of removed ones, and reasons of kept ones.

    Attributes:
        removed: name of each removed folder -> its bytes.
        left: name of each folder that stays -> the reason.
    """

    removed: Mapping[str, int]
    left: Mapping[str, str]

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "removed": f"{len(self.removed)} removed, {megabytes(sum(self.removed.values()))}",
            "names": ", ".join(self.removed),
            "left": len(self.left) or None,
        }


def staging_name(out: str) -> str:
    """The name of this process's staging folder for the output `out`."""
    pid = os.getpid()
    return f".{out}.{pid}-{_start_of(pid) or 0}-{_place()}.staging"


def find_staging(parent: Path) -> list[Staging]:
    """Every staging folder in `parent`, by name."""
    stagings = []
    for path in sorted(parent.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        is_here = match["place"] == _place()
        is_live = not is_here or _is_live(int(match["pid"]), int(match["start"]))
        stagings.append(Staging(path=path, out=match["out"], is_here=is_here, is_live=is_live))
    return stagings


def clean_folder(parent: Path, older_than: float | None) -> CleanReport:
    """Remove the staging folders in `parent` that nobody works on any more."""
    if not parent.is_dir():
        raise OutputError(parent, "no such folder", fix="give the parent of outputs")
    removed, left = {}, {}
    for staging in find_staging(parent):
        why = staging.why_left(older_than)
        if why is None:
            removed[staging.path.name] = staging.nbytes
            shutil.rmtree(staging.path)
        else:
            left[staging.path.name] = why
    return CleanReport(removed=removed, left=left)


def remove_stale(parent: Path, out: str) -> None:
    """Remove what dead processes of this machine left for the output `out`, where permitted."""
    with contextlib.suppress(OSError):
        for staging in find_staging(parent):
            if staging.out == out and not staging.is_live:
                shutil.rmtree(staging.path)


def _is_live(pid: int, start: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return _start_of(pid) in (start, None)


def _start_of(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, -1 if it has ended; None = unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return -1 if fields[0] in "ZX" else int(fields[19])


def _place() -> str:
    numbers = Path("/proc/self/ns/pid")  # a name that is not resolved: pid:[4026531836]
    machine = Path("/etc/machine-id")
    parts = (
        socket.gethostname(),
        str(numbers.readlink()) if numbers.is_symlink() else "",
        machine.read_text(encoding="utf-8", errors="replace") if machine.is_file() else "",
    )
    return hashlib.sha256("\n".join(parts).encode("utf-8", "replace")).hexdigest()[:12]


def check_output(out: Path, source: Path | None = None, *, needed_bytes: int = 0) -> None:
    """Refuse an output that cannot or must not be written, before any work."""
    for what, fix in _problems(out, source, needed_bytes):
        raise OutputError(out, what, fix=fix)


def _problems(out: Path, source: Path | None, needed_bytes: int) -> Iterator[tuple[str, str]]:
    parent = out.absolute().parent
    if out.exists() or out.is_symlink():
        fix = "give another name, or move this one away"
        yield "it already exists, and is never overwritten", fix
    if parent.exists() and not parent.is_dir():
        yield f"its parent {parent} is a file", "give a name in a folder"
    if not parent.is_dir():
        yield f"its parent folder {parent} does not exist", f"mkdir -p {parent}"
    if not os.access(parent, os.W_OK):
        yield f"its parent {parent} is not writable", "choose another place"
    if source is not None and (parent.resolve() / out.name).is_relative_to(source.resolve()):
        yield f"overlaps the source {source}", "write it beside the source"
    free = shutil.disk_usage(parent).free
    if free < needed_bytes and not os.statvfs(parent).f_blocks:  # such as /proc and /sys
        what = f"{parent} is not on a disk: its file system has no space at all"
        yield what, "choose another place"
    if free < needed_bytes:
        what = f"needs {needed_bytes:,} bytes, {parent} has {free:,} free"
        yield what, "free some space, or write to another disk"


@contextmanager
def _written(path: Path, what: str = "", kept: str = "") -> Iterator[None]:
    """Turn an OSError inside the block into an error of this path."""
    try:
        yield
    except OSError as exc:
        sentence = f"{what}cannot be written: {exc.strerror or exc}"
        fix = f"free some space or choose another place{kept}"
        raise OutputError(path, sentence, fix=fix) from exc


@contextmanager
def staged_output(
    out: Path, *, last: str | None = None, check: Callable[[Path], None] = lambda _staging: None
) -> Iterator[Path]:
    """Give a hidden folder beside `out`; leaving the block without an exception publishes it.

    Everything in it must have been synced by its writer; the rename is atomic.

    Args:
        last: the file that makes the folder complete; written as `last` + `UNVERIFIED`, it gets
            its name when everything else is done.
        check: is called then, with the staging folder, and raises if it must not be published.
    """
    staging = out.parent / staging_name(out.name)
    remove_stale(out.parent, out.name)
    if staging.exists():
        raise OutputError(out, "this process is already writing it", fix="wait until it is done")
    try:
        with _written(out, kept="; nothing was kept"):
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
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # what stays is stale: the next run removes it


@contextmanager
def _hidden_folder(beside: Path, *, of: str) -> Iterator[Path]:
    """Give a hidden folder beside a path until the block ends; remove what killed runs left."""
    folder = beside.parent / staging_name(of)
    remove_stale(beside.parent, of)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def staged_source(out: Path) -> Iterator[Path]:
    """Give a hidden folder beside `out` for the source of `out`, until the block ends."""
    with ExitStack() as made:
        with _written(out, "what it is made of ", "; nothing was kept"):
            folder = made.enter_context(_hidden_folder(out, of=f"{out.name}.source"))
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
    """Write or replace a text file: completely, or nothing changes."""
    with _written(path), _hidden_folder(path, of=path.name) as staging:
        write_text(staging / path.name, text)
        (staging / path.name).replace(path)
        sync(path.parent)
