"""Files of torch.save, read as hostile input: plain tensors, numbers and text, never objects.

Pickles can run any code that they name: torch's restricted reader refuses all but what tensors
need, and how much it may unpack is bounded before it starts.
"""

import gzip
import io
import math
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
"""Most growth when unpacked. BF16 features grow by a quarter; only repeated values grow more."""
_EXPANDED_FREE = 64 * 2**20  # bytes that any compressed file may unpack to
_MOST_VIEWS = 16
"""How often the tensors of a file may share the same bytes: a head is tied to an embedding."""
_OBJECTS = re.compile(r"Unsupported (global: GLOBAL \S+|class \S+|operand \d+)")


class TorchFileProblem(Exception):  # noqa: N818 - not an error of its own: callers turn it into one
    """Why a file of torch.save is not read."""


def load_plain(path: Path, *, most_bytes: int | None = None) -> Any:
    """Read a file of torch.save, even gzipped (`.gz`), of at most `most_bytes` unpacked."""
    try:
        with open_stream(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if path.suffix == ".gz":
                unpacked = _unpacked(stream, _EXPANDED_FREE + MAX_EXPANSION * size)
                loaded = _load(unpacked, unpacked.getbuffer().nbytes, most_bytes)
            else:
                loaded = _load(stream, size, most_bytes)
        _check_views(loaded)
        return loaded
    except pickle.UnpicklingError as exc:
        match = _OBJECTS.search(str(exc))
        named = f" ({match[1]})" if match else ""
        raise TorchFileProblem(
            f"it holds Python objects{named}, which could run code, or it is cut off"
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
    limit = size if most_bytes is None else most_bytes
    if zipfile.is_zipfile(stream):
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:  # torch unpacks what is compressed
            size = max(size, sum(member.file_size for member in archive.infolist()))
    if size > limit:
        raise ValueError(f"{size:,} bytes, expected at most {limit:,}")
    stream.seek(0)
    with warnings.catch_warnings():  # about pickles that torch.save did not write, before the error
        warnings.simplefilter("ignore")
        return torch.load(stream, map_location="cpu", weights_only=True)


def _check_views(loaded: Any) -> None:
    """Refuse tensors longer than their storage: a view like that costs nothing to save."""
    seen: set[int] = set()  # lists may contain each other, or themselves
    stands_for: dict[int, int] = {}
    waiting = [loaded]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
            stored = 0 if value.is_meta else value.untyped_storage().nbytes()
            # Not nbytes, which is wrong where the product exceeds 64 bits.
            nbytes = math.prod(value.shape) * value.element_size()
            if nbytes > stored:
                what = f"a tensor of {nbytes:,} bytes of which {stored:,} are stored"
                raise ValueError(f"{what}: it repeats them; save a copy of it (clone)")
            place = value.untyped_storage().data_ptr() if stored else 0
            stands_for[place] = stands_for.get(place, 0) + nbytes
            if stands_for[place] > _MOST_VIEWS * stored:
                what = f"tensors of {stands_for[place]:,} bytes together"
                same = f"are views of the same {stored:,}"
                raise ValueError(f"{what} {same}; save copies of them (clone)")
