"""Regular files, opened without ever waiting, even if the name is that of a FIFO or a device."""

import fnmatch
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .errors import CheckpointError

AnyPath = str | os.PathLike[str]
"""A file or folder as a caller gives it."""
MAX_DOCUMENT_BYTES = 32 * 2**20
"""Limit of one JSON document. The index of a target of 140,000 tensors has 14 MB."""


def optional_path(path: AnyPath | None) -> Path | None:
    """The path, if one is given."""
    return None if path is None else Path(path)


def open_regular(path: Path) -> int:
    """A descriptor for reading, which the caller closes; an OSError unless the file is regular."""
    try:
        # Without O_NONBLOCK the open itself waits for a FIFO's writer. Regular files ignore it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as exc:  # a NUL in the name
        raise OSError(f"no file can have this name: {exc}") from exc
    return _checked(descriptor)


def open_kept(path: Path) -> int:
    """The same for reading and appending; creates the file where there is none."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    return _checked(os.open(path, flags, 0o666))


def open_stream(path: Path) -> io.BufferedReader:
    """The same as a buffered stream."""
    return io.BufferedReader(io.FileIO(open_regular(path)))


def read_text(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> str:
    """Read UTF-8 text of at most `limit` bytes, without the byte order mark that Windows writes."""
    with open_stream(path) as stream:
        content = stream.read(limit + 1)  # not the size that it claims: it may grow
    if len(content) > limit:
        raise OSError(f"it has more than {limit:,} bytes, far more than any file of its kind")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise OSError(str(exc)) from exc


def _checked(descriptor: int) -> int:
    mode = os.fstat(descriptor).st_mode  # of the open file, whatever the name stands for by now
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    other = "a FIFO" if stat.S_ISFIFO(mode) else "a device or a socket"
    raise OSError(f"{'a folder' if stat.S_ISDIR(mode) else other}, not a file")


# A link may lead to another file of its folder, or from a snapshot in the Hub's cache to a blob of
# the same repository (`models--X/snapshots/REV/file -> ../../blobs/HASH`; for a data set
# `datasets--X`). Any other link could bring a file of the machine into an output.

MASK_EMBEDDING_FILE = "mask_embedding.pt"  # the only one that engines read beside the safetensors
_REPOSITORIES = ("models--", "datasets--")  # how their names in the Hub's cache begin
SIGNATURE_FILE = "model.sig"  # signs one folder, and none that is made from it
_WEIGHTS = (
    "*.bin", "*.bin.index.json", "*.ckpt", "*.ggml", "*.gguf", "*.h5", "*.joblib", "*.msgpack",
    "*.npy", "*.npz", "*.onnx", "*.onnx_data", "*.pickle", "*.pkl", "*.pt", "*.pt2", "*.pth",
    "*.safetensors", "*.safetensors.index.json", "*.tflite",
)  # fmt: skip


class Entry(NamedTuple):
    """One file: its path relative to the folder, and why it cannot be read as a file, or None."""

    file: str
    problem: str | None


def entries(folder: Path) -> Iterator[Entry]:
    """Every entry below `folder` except folders, by name; links are not followed."""

    def refuse(exc: OSError) -> None:
        raise CheckpointError(exc.filename, f"cannot be listed: {exc.strerror}",
                              fix="make the folder readable") from exc  # fmt: skip

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for path in sorted(Path(parent, name) for name in (*files, *links)):
            yield Entry(path.relative_to(folder).as_posix(), _problem(path, folder))


def files_of(folder: Path, *, skip: Callable[[str], bool]) -> list[str]:
    """Every file below `folder`, relative, by name; only skipped ones may be links out of it."""
    kept = [entry for entry in entries(folder) if not skip(entry.file)]
    for file, problem in kept:
        _check(folder / file, problem)
    return [file for file, _ in kept]


def check_own(folder: Path, file: str) -> None:
    """Refuse a link out of the folder where this file, which may be absent, should be."""
    path = folder / file
    if path.is_symlink():
        _check(path, _problem(path, folder))


def looks_like_weights(file: str) -> bool:
    """True for weights or pickles in another format, by name; a mask embedding is neither."""
    name = Path(file).name.lower()
    return file != MASK_EMBEDDING_FILE and any(fnmatch.fnmatchcase(name, p) for p in _WEIGHTS)


def _check(path: Path, problem: str | None) -> None:
    if problem is not None:
        raise CheckpointError(
            path,
            f"expected a file of the folder, got {problem}",
            fix="put the file itself there, or move this out of the folder",
        )


def _problem(path: Path, folder: Path) -> str | None:
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        return None
    if not stat.S_ISLNK(mode):
        return "neither a file nor a folder"
    link = f"a link to {path.readlink()}"
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # absent, or a circle of links
        return f"{link}, which leads nowhere"
    if not target.is_file():
        return f"{link}, which is no file"
    root = folder.resolve()
    snapshots = [parent for parent in root.parents if parent.name == "snapshots"]
    repositories = [p.parent for p in snapshots if p.parent.name.startswith(_REPOSITORIES)]
    homes = [root, *(repository / "blobs" for repository in repositories)]
    return None if any(target.is_relative_to(home) for home in homes) else f"{link}, elsewhere"
