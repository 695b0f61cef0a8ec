"""A disk that fails: the n-th call of this process on files of one folder goes wrong.

The calls are those by which this package and Python's own files reach the kernel. What torch and
safetensors read by themselves is not seen.
"""

import builtins
import errno
import functools
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Fault = Literal["ENOSPC", "EIO", "short"]
"""No space left, an error of the device, or half of what was asked for."""
_WRITING: tuple[Fault, ...] = ("ENOSPC", "EIO", "short")
_READING: tuple[Fault, ...] = ("EIO", "short")
_ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
KINDS: dict[str, tuple[Fault, ...]] = {
    "write": _WRITING, "pwrite": _WRITING, "copy_file_range": _WRITING, "sendfile": _WRITING,
    "posix_fallocate": ("ENOSPC", "EIO"), "mkdir": ("ENOSPC", "EIO"), "rename": ("ENOSPC", "EIO"),
    "create": ("ENOSPC", "EIO"), "fsync": ("ENOSPC", "EIO"),
    "read": _READING, "preadv": _READING, "pread": _READING, "open": ("EIO",),
}  # fmt: skip
"""Call -> how it can go wrong."""


class FailingDisk:
    """Counts calls on files below `folder`, and lets one of them fail.

    Attributes:
        seen: the names of the calls so far, in order.
    """

    def __init__(self, folder: Path, *, at: int | None = None, fault: Fault = "EIO") -> None:
        """Let call number `at`, from 0, fail; None = none."""
        self.seen: list[str] = []
        self._folder = str(folder.resolve())
        self._at = at
        self._fault = fault

    def install(self) -> None:
        """Put this disk below the calls of the whole process, for good."""
        for name, length, where in (
            ("write", 1, 0), ("pwrite", 1, 0), ("copy_file_range", 2, 1), ("sendfile", 3, 0),
            ("posix_fallocate", None, 0), ("fsync", None, 0), ("mkdir", None, 0),
            ("rename", None, 0), ("pread", 1, 0), ("preadv", 1, 0),
        ):  # fmt: skip
            self._wrap(name, length, where)
        plain = os.open

        def opening(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                self._meets("create", path)
            return plain(path, flags, *rest, **named)

        os.open = opening
        io.open = builtins.open = self._opened
        shutil._USE_CP_SENDFILE = True  # type: ignore[attr-defined]

    def _wrap(self, name: str, length: int | None, where: int) -> None:
        """Replace os.NAME, whose argument `where` says the file and `length` how much."""
        plain: Callable[..., Any] = getattr(os, name)

        @functools.wraps(plain)
        def call(*arguments: Any, **named: Any) -> Any:
            if self._meets(name, arguments[where]) and length is not None:
                arguments = (*arguments[:length], _half(arguments[length]),
                             *arguments[length + 1 :])  # fmt: skip
            return plain(*arguments, **named)

        setattr(os, name, call)

    def _meets(self, name: str, file: Any) -> bool:
        """Count a call; True if it is to be a short one.

        Raises:
            OSError: it is the one to fail.
        """
        if not self._is_inside(file):
            return False
        self.seen.append(name)
        if self._at != len(self.seen) - 1:
            return False
        if self._fault == "short":
            return True
        number = _ERRORS[self._fault]
        raise OSError(number, os.strerror(number))

    def _is_inside(self, file: Any) -> bool:
        if isinstance(file, int):
            try:
                return os.readlink(f"/proc/self/fd/{file}").startswith(self._folder)  # noqa: PTH115
            except OSError:
                return False
        return str(Path(os.fsdecode(file)).absolute()).startswith(self._folder)

    def _opened(
        self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any
    ) -> Any:
        """What `open` gives, over a file whose reads and writes are counted."""
        if isinstance(file, int) or "+" in mode or not self._is_inside(file):
            return _PLAIN_OPEN(file, mode, buffering, *rest, **named)
        self._meets("open" if mode.startswith("r") else "create", file)
        raw = _File(file, mode.replace("b", "").replace("t", ""), self._meets)
        if buffering == 0:
            return raw
        buffer = io.BufferedReader(raw) if mode.startswith("r") else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *rest, **named)


_PLAIN_OPEN = builtins.open


class _File(io.FileIO):
    """A file whose reads and writes are counted."""

    def __init__(self, file: Any, mode: str, meets: Callable[[str, Any], bool]) -> None:
        super().__init__(file, mode)
        self._meets = meets

    def write(self, data: Any) -> int:
        if self._meets("write", self.fileno()):
            data = _half(data)
        return super().write(data) or 0

    def readinto(self, buffer: Any) -> int:
        if self._meets("read", self.fileno()):
            there = os.fstat(self.fileno()).st_size - self.tell()
            buffer = memoryview(buffer).cast("B")[: max(1, there // 2)]
        return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        """By `readinto`, so that a short read is one."""
        found = bytearray()
        block = bytearray(1 << 16)
        while count := self.readinto(memoryview(block)):
            found += block[:count]
        return bytes(found)

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        block = bytearray(size)
        return bytes(block[: self.readinto(memoryview(block))])


def _half(asked: Any) -> Any:
    """Half of a length, of a buffer, or of a list of one buffer; at least one byte."""
    if isinstance(asked, int):
        return max(1, asked // 2)
    if isinstance(asked, list):
        return [_half(asked[0])]
    view = memoryview(asked).cast("B")
    return view[: max(1, len(view) // 2)]
