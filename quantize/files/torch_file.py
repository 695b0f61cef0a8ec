"""Files of torch.save, read as hostile input: plain tensors, numbers and text, never objects.

They are pickles, which can run whatever code they name: torch's restricted reader refuses all but
what tensors need, and how much it may unpack is bounded before it starts.
"""

import gzip
import io
import os
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch

from ...recipes.regular_file import open_stream

MAX_EXPANSION = 50
"""Of a compressed file. Features in BF16 shrink by a fifth; what shrinks more is one value."""
_EXPANDED_FREE = 64 * 2**20  # bytes that any compressed file may unpack to
_OBJECTS = re.compile(r"Unsupported (global: GLOBAL \S+|class \S+|operand \d+)")


class TorchFileProblem(Exception):  # noqa: N818 - not an error of its own: callers turn it into one
    """Why a file of torch.save is not read."""


def load_plain(path: Path, *, most_bytes: int | None = None) -> Any:
    """Read a file of torch.save, also one that gzip compressed (`.gz`), to the CPU.

    Args:
        path: the file.
        most_bytes: that it may hold unpacked; None = as many as it has on the disk.

    Returns:
        What was saved: tensors, numbers, text, and lists and dicts of them.

    Raises:
        TorchFileProblem: it cannot be opened, is cut off, holds objects, or unpacks to too much.
    """
    try:
        with open_stream(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if path.suffix == ".gz":
                unpacked = _unpacked(stream, _EXPANDED_FREE + MAX_EXPANSION * size)
                return _load(unpacked, unpacked.getbuffer().nbytes, most_bytes)
            return _load(stream, size, most_bytes)
    except pickle.UnpicklingError as exc:
        found = _OBJECTS.search(str(exc))
        named = f" ({found[1]})" if found else ""
        raise TorchFileProblem(
            f"holds Python objects{named}, or is cut off: objects could run code"
        ) from exc
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError,
            ImportError, ArithmeticError, AssertionError, MemoryError, NameError, struct.error,
            zipfile.BadZipFile, zlib.error) as exc:  # fmt: skip
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        raise TorchFileProblem(reason) from exc


def _unpacked(stream: IO[bytes], limit: int) -> io.BytesIO:
    with gzip.GzipFile(fileobj=stream) as packed:
        content = packed.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"unpacks to more than {limit:,} bytes, {MAX_EXPANSION} times its size")
    return io.BytesIO(content)


def _load(stream: IO[bytes], size: int, most_bytes: int | None) -> Any:
    """What the stream holds; its size is bounded before torch makes tensors of it."""
    limit = size if most_bytes is None else most_bytes
    if zipfile.is_zipfile(stream):
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:  # torch unpacks what is compressed
            size = max(size, sum(member.file_size for member in archive.infolist()))
    if size > limit:
        raise ValueError(f"{size:,} bytes, expected at most {limit:,}")
    stream.seek(0)
    with warnings.catch_warnings():  # of pickles that no torch.save wrote, on their way to an error
        warnings.simplefilter("ignore")
        return torch.load(stream, map_location="cpu", weights_only=True)
