"""Staging folders: which process a folder belongs to, and which are left of processes that died.

The name says it: `.OUT.PID-START-PLACE.staging`. START is when the process began, against numbers
given twice; PLACE stands for the machine and the space in which its process numbers hold, so that
containers and machines that share a disk never take a live run of each other for a dead one.
"""

import contextlib
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ..errors import OutputError

_NAME = re.compile(
    r"\.(?P<out>.+)\.(?P<pid>\d{1,7})-(?P<start>\d+)-(?P<place>[0-9a-f]{12})\.staging", re.DOTALL
)
_HOUR = 3600.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """One staging folder.

    Attributes:
        out: name of the output that it was to become.
        is_here: its process runs, or ran, on this machine.
        is_live: its process runs, as far as that can be told from here.
    """

    path: Path
    out: str
    is_here: bool
    is_live: bool

    @property
    def nbytes(self) -> int:
        """Size of its files in bytes."""
        return sum(status.st_size for status in self._files())

    def idle_hours(self) -> float:
        """Hours since anything in it changed."""
        changes = [self.path.lstat().st_mtime, *(status.st_mtime for status in self._files())]
        return (time.time() - max(changes)) / _HOUR

    def why_left(self, older_than: float | None) -> str | None:
        """Why it must stay; None = nobody works on it any more.

        Args:
            older_than: hours after which a run on another machine counts as dead; None = never.
        """
        if self.is_here:
            return "its run is alive" if self.is_live else None
        hours = self.idle_hours()
        if older_than is None or hours <= older_than:
            return f"of another machine or container, last changed {hours:.1f} hours ago"
        return None

    def _files(self) -> Iterator[os.stat_result]:
        for parent, _, files in os.walk(self.path):
            for file in files:
                yield Path(parent, file).lstat()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CleanReport(Brief):
    """What became of the unfinished folders that interrupted runs left.

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
    found = []
    for path in sorted(parent.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        is_here = match["place"] == _place()
        is_live = not is_here or _is_live(int(match["pid"]), int(match["start"]))
        found.append(Staging(path=path, out=match["out"], is_here=is_here, is_live=is_live))
    return found


def clean_folder(parent: Path, older_than: float | None = None) -> CleanReport:
    """Remove the staging folders in `parent` that nobody works on any more.

    Args:
        older_than: see `Staging.why_left`.

    Raises:
        OutputError: there is no such folder.
    """
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
    """Remove what dead processes of this machine left of the output `out`, as far as it may."""
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
    """Clock ticks from boot to the start of a process, -1 of one that has ended; None = unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
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
