"""The safetensors header: names, dtypes, shapes and byte ranges of one file, read as hostile input.

Layout of a file (huggingface/safetensors README): 8 bytes little-endian header length N, N bytes of
JSON, then the tensor data.
"""

import math
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...recipes.errors import CheckpointError, short
from ...recipes.regular_file import open_stream
from ...recipes.strict_json import JsonProblem, Pairs, parse_json, reading

FloatDtype = Literal["BF16", "F16", "F32"]
"""The dtypes of a draft's weights where they are not quantized."""
LFS_POINTER = b"version https://git-lfs.github.com/"
MAX_HEADER_BYTES = 32 * 2**20
"""A file of 100,000 tensors has 15 MB. The safetensors library takes 100 MB, which need 2.6 GB."""
MAX_NAME = 1000  # characters; patterns are matched with names
MAX_AXES = 16  # no draft has more than 3; millions of axes take hours to multiply

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies, in absolute byte offsets of a file of the draft folder."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def as_stored(self) -> "StoredTensor":
        """The same tensor in an output, wherever it will be there."""
        return StoredTensor(name=self.name, dtype=self.dtype, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of the output: on-disk name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The tensors of one file in the order of their data, and its free-form `__metadata__`."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]

    def only(self, names: Collection[str]) -> "Header":
        """The header with only these tensors."""
        kept = tuple(tensor for tensor in self.tensors if tensor.name in names)
        return Header(tensors=kept, metadata=self.metadata)


def read_header(folder: Path, file: str) -> Header:
    """Read the header of `folder/file`; CheckpointError where it is not as required."""
    path = folder / file
    with reading(path, CheckpointError, "check the draft folder"), open_stream(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        begin = stream.read(8)
        if begin == LFS_POINTER[:8]:
            what = f"it is a pointer of Git LFS ({size} bytes), not the tensors themselves"
            fix = f"run git -C {folder} lfs pull, or download the file from the Hub"
            raise CheckpointError(path, what, fix=fix)
        length = int.from_bytes(begin, "little")
        if not size:
            fix = "download or export the file again: writing it was interrupted"
            raise CheckpointError(path, "the file is empty (0 bytes)", fix=fix)
        if size < 8 or length > size - 8:
            what = f"header of {length} bytes does not fit a file of {size} bytes"
            fix = "download the file again: it is cut off, or not a safetensors file"
            raise CheckpointError(path, what, fix=fix)
        if length > MAX_HEADER_BYTES:
            raise _lie(path, f"header of {length} bytes, expected at most {MAX_HEADER_BYTES}")
        text = stream.read(length)
    entries = _parse(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _lie(path, "__metadata__ is not a mapping of text to text")
    first_byte = 8 + length
    tensors = [_tensor(path, file, name, entry, first_byte) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    _check_ranges(path, tensors, first_byte, size)
    return Header(tensors=tuple(tensors), metadata=metadata)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: Pairs) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise _lie(path, f"{short(twice)} stands twice in the header")
        return entries

    try:
        entries = parse_json(text.decode("utf-8"), unique)
    except (UnicodeDecodeError, JsonProblem) as exc:
        raise _lie(path, f"the header is not JSON ({exc})") from exc
    if not isinstance(entries, dict):
        raise _lie(path, "the header is not a JSON object")
    return entries


def _tensor(path: Path, file: str, name: str, entry: Any, first_byte: int) -> TensorInfo:
    if len(name) > MAX_NAME:
        raise _lie(path, f"{short(name)}: a name of {len(name)} characters")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _lie(path, f"{name}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        what = f"{name}: dtype {short(dtype)} is not one of {', '.join(DTYPE_BYTES)}"
        raise CheckpointError(path, what, fix="convert the tensor to a supported dtype")
    if not _naturals(shape) or len(shape) > MAX_AXES:
        raise _lie(path, f"{name}: shape {short(shape)} is not a list of natural numbers")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _lie(path, f"{name}: data_offsets {short(offsets)} is not a byte range")
    start, stop = (first_byte + offset for offset in offsets)
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if stop - start != expected:
        given = f"needs {expected} bytes, data_offsets give {stop - start}"
        raise _lie(path, f"{name}: {dtype} {shape} {given}")
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), file=file, start=start, stop=stop)


def _check_ranges(path: Path, tensors: list[TensorInfo], first_byte: int, size: int) -> None:
    """Every data byte belongs to exactly one tensor."""
    end = first_byte
    for tensor in tensors:
        if tensor.start != end:
            kind = "overlaps the tensor before it" if tensor.start < end else "leaves a hole"
            where = f"{tensor.name}: starts at byte {tensor.start}"
            raise _lie(path, f"{where}, expected {end}: {kind}")
        end = tensor.stop
    if end != size:
        kind = "truncated" if end > size else "followed by bytes that no tensor owns"
        what = f"the header describes {end} bytes, the file has {size}: {kind}"
        raise CheckpointError(path, what, fix="download or export the file again")


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**63 for item in value
    )


def _lie(path: Path, what: str) -> CheckpointError:
    return CheckpointError(path, what, fix="download or export the file again: it is damaged")


_MOST = 8
"""More would wait for memory; and each holds some blocks of rows, about 20 MB."""

WORKERS = max(1, min(_MOST, len(os.sched_getaffinity(0))))
"""At most the cores of this process. Kernels, torch and numpy release the interpreter lock."""
