"""A regular file: opened without ever waiting, and read as text up to a limit.

Every file that a user names is opened here. A FIFO or a device under the name of a file would block
for ever or never end; a file of a gigabyte where a config is expected would fill the memory.
"""

import io
import os
import stat
from pathlib import Path

MAX_DOCUMENT_BYTES = 32 * 2**20
"""Of one JSON document. The index of a target of 140,000 tensors has 14 MB."""


def open_regular(path: Path) -> int:
    """Open a file for reading; the descriptor is the caller's to close.

    Raises:
        OSError: it is absent, may not be read, or is no regular file (or a link to one).
    """
    try:
        # Without O_NONBLOCK the open itself waits for a FIFO's writer. Regular files ignore it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as exc:  # a NUL in the name
        raise OSError(f"no file can have this name: {exc}") from exc
    mode = os.fstat(descriptor).st_mode  # of what was opened, whatever the name stands for by now
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(f"{_kind(mode)}, not a file")
    return descriptor


def open_kept(path: Path) -> int:
    """Open a file for reading and for appending, which is made where there is none.

    Raises:
        OSError: it may not be read or written, or is no regular file (or a link to one).
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(f"{_kind(mode)}, not a file")
    return descriptor


def open_stream(path: Path) -> io.BufferedReader:
    """Open a file for reading, as a buffered stream.

    Raises:
        OSError: as of `open_regular`.
    """
    return io.BufferedReader(io.FileIO(open_regular(path)))


def read_text(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> str:
    """Read a whole file of UTF-8 text; a byte order mark in front, as Windows writes, is skipped.

    Args:
        limit: bytes, more of which are refused before they are read.

    Raises:
        OSError: as of `open_regular`; it is longer than that, or is not UTF-8.
    """
    with open_stream(path) as stream:
        content = stream.read(limit + 1)  # not the size that it claims: it may grow
    if len(content) > limit:
        raise OSError(f"it has more than {limit:,} bytes, far more than any file of its kind")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise OSError(str(exc)) from exc


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a FIFO" if stat.S_ISFIFO(mode) else "a device or a socket"
