"""One file under a second name: a hard link, a symbolic link, or a copy of its bytes."""

import errno
import os
from pathlib import Path
from typing import Literal

LinkChoice = Literal["hard", "symbolic", "none"]
LinkedAs = Literal["hard link", "symbolic link", "copy"]
_COPY_BYTES = 64 << 20
_NO_HARD_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES}
"""Another disk, a file system without them, too many of one file, a file of somebody else."""
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def hard_links_work(file: Path, folder: Path, probe: str) -> bool:
    """Whether this file can be hard-linked into a folder, which is tried.

    Raises:
        OSError: nothing can be written there at all.
    """
    trial = folder / probe
    try:
        os.link(file.resolve(), trial)
    except OSError as exc:
        if exc.errno in _NO_HARD_LINK:
            return False
        raise
    trial.unlink()
    return True


def place(file: Path, into: Path, how: LinkChoice) -> LinkedAs:
    """Give a file a second name, or copy it where a hard link cannot be made.

    Links lead to the file itself, also where `file` is a link: so does a snapshot of the Hub.

    Raises:
        OSError: writing failed.
    """
    itself = file.resolve()
    if how == "symbolic":
        into.symlink_to(itself)
        return "symbolic link"
    if how == "hard":
        try:
            os.link(itself, into)
        except OSError as exc:
            if exc.errno not in _NO_HARD_LINK:
                raise
        else:
            return "hard link"
    _copy(itself, into)
    return "copy"


def _copy(file: Path, into: Path) -> None:
    """Byte for byte, inside the kernel where it can: some file systems then share the blocks."""
    with file.open("rb") as source, into.open("xb") as target:
        left = os.fstat(source.fileno()).st_size
        while left:
            done = _some(source.fileno(), target.fileno(), min(left, _COPY_BYTES))
            if not done:
                raise OSError(errno.EIO, "the file became shorter while it was copied", str(file))
            left -= done


def _some(source: int, target: int, length: int) -> int:
    try:
        return os.copy_file_range(source, target, length)
    except OSError as exc:
        if exc.errno not in _NO_KERNEL_COPY:
            raise
    chunk = os.read(source, length)
    view = memoryview(chunk)
    while view:
        view = view[os.write(target, view) :]
    return len(chunk)
