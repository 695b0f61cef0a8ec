"""Rows of a file as a tensor that takes no memory of its own: the kernel reads what is looked at.

What was looked at counts as resident until it is given back with `release`; `row_blocks` does that
behind each block, so that a pass over rows of any number holds one block of them.
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
"""Rows that are looked at together."""
_MAPS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Address of the storage of a tensor -> the map that it shows."""


class SpooledRows:
    """Rows [longest, width] that are written in any order to a file without a name.

    The file is gone when nothing refers to its rows, and when the process is killed.

    Args:
        width: elements of a row. dtype: of them.
    """

    def __init__(self, folder: Path, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it outlives this call

    def write(self, start: int, rows: Tensor) -> None:
        """Write rows [n, width] from row `start` on.

        Raises:
            OSError: the disk is full.
        """
        own = rows.to(self._dtype).cpu().contiguous()
        self._file.seek(start * self._width * self._dtype.itemsize)
        self._file.write(own.reshape(-1).view(torch.uint8).numpy().data)

    def rows(self, count: int) -> Tensor:
        """The first rows, [count, width], which were all written; then no more are."""
        with self._file:
            self._file.flush()
            return _mapped(self._file.fileno(), 0, (count, self._width), self._dtype)


def mapped_rows(path: Path, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Rows of a file, not to be written to.

    Args:
        start: its first byte of them.
        shape: of the tensor, at least one element.

    Raises:
        OSError: the file cannot be opened, or ends before.
    """
    with open_stream(path) as stream:
        return _mapped(stream.fileno(), start, tuple(shape), dtype)


def _mapped(descriptor: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    found = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    count = torch.Size(shape).numel()
    if start + count * dtype.itemsize > len(found):
        raise OSError(f"it ends inside {list(shape)} {dtype} from byte {start}")
    rows = torch.frombuffer(found, dtype=dtype, count=count, offset=start)
    _MAPS[rows.untyped_storage().data_ptr()] = found
    return rows.view(shape)


def release(rows: Tensor) -> None:
    """Give back the memory of a mapped file that was looked at; of other tensors nothing."""
    found = _MAPS.get(rows.untyped_storage().data_ptr())
    if found is not None and hasattr(mmap, "MADV_DONTNEED"):
        found.madvise(mmap.MADV_DONTNEED)


def row_blocks(rows: Tensor) -> Iterator[Tensor]:
    """All rows [n, ...], some at a time, each block given back behind it: see `release`."""
    for block in torch.split(rows, BLOCK_ROWS):
        yield block
        release(rows)
