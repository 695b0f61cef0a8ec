"""Writing one safetensors file whose header is known before the first byte of data moves."""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ...recipes.errors import CheckpointError
from .checkpoint import CHANGED, Checkpoint, open_weights
from .safetensors_header import DTYPE_BYTES, StoredTensor, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

COPY_BYTES = 64 << 20
"""Bytes of one call. During an import, the interpreter lets no other thread run for 5 ms."""
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def copy_range(source: int, target: int, length: int, start: int, at: int) -> int:
    """Copy bytes between open files, inside the kernel if possible: as many as there are."""
    done = 0
    while done < length:
        count = min(length - done, COPY_BYTES)
        try:
            count = os.copy_file_range(source, target, count, start + done, at + done)
        except OSError as exc:
            if exc.errno not in _NO_KERNEL_COPY:
                raise
            chunk = os.pread(source, count, start + done)
            write_at(target, memoryview(chunk), at + done)
            count = len(chunk)
        if not count:
            break
        done += count
    return done


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all bytes of a view."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


class SafetensorsFile:
    """A safetensors file being written; use as a context manager."""

    def __init__(
        self,
        path: Path,
        tensors: Sequence[StoredTensor],
        metadata: Mapping[str, str],
        *,
        synced: bool = True,
    ) -> None:
        """Lay out a new file; unless `synced`, the publisher syncs it to the disk."""
        self._synced = synced
        # Wide dtypes first, then by name: every tensor is aligned, and the order is reproducible.
        ordered = sorted(tensors, key=lambda t: (-DTYPE_BYTES[t.dtype], t.name))
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        self.path = path
        self.start: dict[str, int] = {}
        end = 0
        for tensor in ordered:
            self.start[tensor.name], begin = end, end
            end += tensor.nbytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self._header) + end
        self._sizes = {tensor.name: tensor.nbytes for tensor in ordered}

    def __enter__(self) -> "SafetensorsFile":
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(self._descriptor, 0, self.nbytes)  # a full disk shows here
            write_at(self._descriptor, memoryview(self._header), 0)
        except OSError:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None and self._synced:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, name: str, data: "Tensor", *, offset: int = 0) -> int:
        """Write a tensor on any device at `offset` bytes into its range; return its bytes."""
        import torch

        view = data.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
        assert offset + len(view) <= self._sizes[name], f"{name}: {offset} + {len(view)} bytes"
        write_at(self._descriptor, view, len(self._header) + self.start[name] + offset)
        return len(view)

    def copy(self, source: int, tensor: TensorInfo) -> None:
        """Copy a kept tensor from an open source file, byte for byte, inside the kernel."""
        target = len(self._header) + self.start[tensor.name]
        done = copy_range(source, self._descriptor, tensor.nbytes, tensor.start, target)
        if done < tensor.nbytes:
            raise CheckpointError(tensor.file, f"ends inside {tensor.name}", fix=CHANGED)


def open_files(
    stack: ExitStack, source: Checkpoint, folder: Path, stored: Mapping[str, Sequence[StoredTensor]]
) -> tuple[dict[str, int], dict[str, SafetensorsFile]]:
    """By file: descriptors of the files of `source`, and of those being written, unsynced."""
    inputs, outputs = {}, {}
    for file, tensors in stored.items():
        inputs[file] = stack.enter_context(open_weights(source.folder / file))
        written = SafetensorsFile(
            folder / file, tensors, source.headers[file].metadata, synced=False
        )
        outputs[file] = stack.enter_context(written)
    return inputs, outputs
