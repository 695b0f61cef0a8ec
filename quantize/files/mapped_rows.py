"""Rows of a file as a tensor without memory of its own.

Pages that were read count as resident until `release` gives them back; `row_blocks` does that after
each block.
"""

import mmap
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...recipes.regular_file import open_stream

BLOCK_ROWS = 4096
"""Rows that are read together."""
_MAPS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Address of the storage of a tensor -> the map that it shows."""


class SpooledRows:
    """Rows [longest, width] that are written in any order to a file without a name."""

    def __init__(self, folder: Path, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it outlives this call

    def write(self, start: int, rows: Tensor) -> None:
        """Write rows [n, width] from row `start` on."""
        stored = rows.to(self._dtype).cpu().contiguous()
        self._file.seek(start * self._width * self._dtype.itemsize)
        self._file.write(stored.reshape(-1).view(torch.uint8).numpy().data)

    def rows(self, count: int) -> Tensor:
        """The first rows, [count, width], which were all written; ends writing."""
        with self._file:
            self._file.flush()
            return _mapped(self._file.fileno(), 0, (count, self._width), self._dtype)


def mapped_rows(path: Path, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Rows of a file from a byte on, read-only; an OSError where it ends before."""
    with open_stream(path) as stream:
        return _mapped(stream.fileno(), start, tuple(shape), dtype)


def _mapped(descriptor: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    count = torch.Size(shape).numel()
    if start + count * dtype.itemsize > len(mapped):
        raise OSError(f"it ends inside {list(shape)} {dtype} from byte {start}")
    rows = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start)
    _MAPS[rows.untyped_storage().data_ptr()] = mapped
    return rows.view(shape)


def release(rows: Tensor) -> None:
    """Give back the memory of a mapped file that was read; does nothing for other tensors."""
    mapped = _MAPS.get(rows.untyped_storage().data_ptr())
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def row_blocks(rows: Tensor) -> Iterator[Tensor]:
    """All rows [n, ...], some at a time, each block released after it."""
    for block in torch.split(rows, BLOCK_ROWS):
        yield block
        release(rows)
