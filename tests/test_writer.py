"""Writing safetensors files: golden bytes, order, alignment, copies."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from draftquant.quantize.files.safetensors_file import SafetensorsFile
from draftquant.quantize.files.safetensors_header import StoredTensor, TensorInfo, read_header
from draftquant.recipes.errors import CheckpointError
from safetensors import safe_open
from safetensors.torch import save

A = StoredTensor(name="a", dtype="BF16", shape=(1, 2))
B = StoredTensor(name="b", dtype="I64", shape=(1,))
C = StoredTensor(name="c", dtype="F8_E4M3", shape=(3,))
VALUES = {
    "a": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16),
    "b": torch.tensor([258]),
    "c": torch.tensor([1.0, -1.0, 0.0]).to(torch.float8_e4m3fn),
}
GOLDEN_HEADER = (  # wide dtypes first; 214 bytes, padded with blanks to a multiple of 8
    b'{"__metadata__":{"format":"pt"},'
    b'"b":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},'
    b'"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]},'
    b'"c":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[12,15]}}'
)
GOLDEN_DATA = b"\x02\x01\0\0\0\0\0\0" + b"\x80\x3f\x00\xc0" + b"\x38\xb8\x00"


def test_golden_bytes(tmp_path: Path) -> None:
    path, header = tmp_path / "x.safetensors", GOLDEN_HEADER + b" " * (-len(GOLDEN_HEADER) % 8)
    with SafetensorsFile(path, [A, B, C], {"format": "pt"}) as file:
        for tensor in (A, B, C):
            file.write(tensor.name, VALUES[tensor.name])
    assert path.read_bytes() == len(header).to_bytes(8, "little") + header + GOLDEN_DATA
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert all(str(file.get_tensor(n)) == str(value) for n, value in VALUES.items())


def test_blocks_go_to_their_offset(tmp_path: Path) -> None:
    tensor = StoredTensor(name="x", dtype="F32", shape=(4, 2))
    values = torch.arange(8, dtype=torch.float32).reshape(4, 2)
    with SafetensorsFile(tmp_path / "x", [tensor], {}) as file:
        assert file.write("x", values[2:], offset=16) == 16
        assert file.write("x", values[:2].T.contiguous().T) == 16  # rows of a transposed view
    assert (tmp_path / "x").read_bytes()[-32:] == values.numpy().tobytes()


@contextmanager
def copying(folder: Path, content: bytes, *, claimed: int | None = None) -> Iterator[bytes]:
    """Copy bytes 5 .. end of a source file; gives what stands in the output."""
    source = folder / "source"
    source.write_bytes(content)
    size = claimed or len(content) - 5
    tensor = TensorInfo(name="x", dtype="U8", shape=(size,), file="source", start=5, stop=5 + size)
    descriptor = os.open(source, os.O_RDONLY)
    stored = StoredTensor(name="x", dtype="U8", shape=(size,))
    try:
        with SafetensorsFile(folder / "out", [stored], {}) as file:
            file.copy(descriptor, tensor)
        yield (folder / "out").read_bytes()[-size:]
    finally:
        os.close(descriptor)


def without_the_kernel(monkeypatch: pytest.MonkeyPatch, error: int = errno.EXDEV) -> None:
    monkeypatch.setattr(os, "copy_file_range", Mock(side_effect=OSError(error, "unsupported")))


@pytest.mark.parametrize("kernel", [True, False])
def test_a_copy_leaves_its_neighbours_alone(
    kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source goes on behind the tensor; so does the output."""
    if not kernel:
        without_the_kernel(monkeypatch)
    (tmp_path / "source").write_bytes(bytes(range(100)))
    tensor = TensorInfo(name="b", dtype="U8", shape=(7,), file="source", start=20, stop=27)
    stored = [StoredTensor(name=name, dtype="U8", shape=(7,)) for name in "abc"]
    with (
        (tmp_path / "source").open("rb") as source,
        SafetensorsFile(tmp_path / "out", stored, {}) as file,
    ):
        for name in "ac":
            file.write(name, torch.full((7,), 255, dtype=torch.uint8))
        file.copy(source.fileno(), tensor)
    written = (tmp_path / "out").read_bytes()
    assert written[-21:] == b"\xff" * 7 + bytes(range(20, 27)) + b"\xff" * 7
    assert len(written) == 8 + int.from_bytes(written[:8], "little") + 21


@pytest.mark.parametrize("kernel", [True, False])
def test_source_that_shrank(kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        without_the_kernel(monkeypatch)
    with (
        pytest.raises(CheckpointError, match="ends inside x\n  fix: run again: the file changed"),
        copying(tmp_path, bytes(100), claimed=200),
    ):
        pytest.fail("copied")


# ---- the safetensors header as hostile input, and a golden file worked by hand


# Two tensors: BF16 1.0 and -2.0, then the bytes 1 and 2.
READ_HEADER = (
    b'{"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},'
    b'"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}'
)
GOLDEN = len(READ_HEADER).to_bytes(8, "little") + READ_HEADER + b"\x80\x3f\x00\xc0\x01\x02"


def entry(
    start: Any = 0, stop: Any = 4, dtype: Any = "F32", shape: Any = (1,), **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop], **more}


def file_of(header: object, data: bytes = bytes(4)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def refused(folder: Path, content: bytes) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(folder, "x.safetensors")
    assert caught.value.where == str(path)
    assert len(str(caught.value)) < 500


def test_golden_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(GOLDEN)
    header = read_header(tmp_path, "x.safetensors")
    first = 8 + len(READ_HEADER)
    a, b = header.tensors
    assert (a.name, a.dtype, a.shape, a.start, a.stop) == ("a", "BF16", (1, 2), first, first + 4)
    assert (b.name, b.dtype, b.shape, b.start, b.stop) == ("b", "U8", (2,), first + 4, first + 6)
    assert (a.nbytes, a.numel, a.file, header.metadata) == (4, 2, "x.safetensors", {})


def test_file_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(0, 3),
        "fp8": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "flags": torch.tensor([True]),
    }
    (tmp_path / "x.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    header = read_header(tmp_path, "x.safetensors")
    assert {t.name: (t.dtype, t.shape) for t in header.tensors} == {
        "scalar": ("F32", ()),
        "empty": ("F32", (0, 3)),
        "fp8": ("F8_E4M3", (3,)),
        "flags": ("BOOL", (1,)),
    }
    (tmp_path / "none.safetensors").write_bytes(file_of({}, b""))
    assert read_header(tmp_path, "none.safetensors").tensors == ()
    # One without bytes begins where the next begins, and may be named after it.
    entries = {"full": entry(0, 4), "empty": entry(0, 0, shape=[0])}
    (tmp_path / "y.safetensors").write_bytes(file_of(entries))
    assert [t.name for t in read_header(tmp_path, "y.safetensors").tensors] == ["empty", "full"]
    assert header.metadata == {"format": "pt"}


def test_file_cut_at_any_byte(tmp_path: Path) -> None:
    for size in range(len(GOLDEN)):
        refused(tmp_path, GOLDEN[:size])


def test_length_that_lies(tmp_path: Path) -> None:
    for length in (10**6, 10**8 + 1, 2**63, 2**64 - 1):
        refused(tmp_path, length.to_bytes(8, "little") + GOLDEN[8:])


LIES = {
    "bytes after the data": file_of({"a": entry()}, bytes(5)),
    "beyond the file": file_of({"a": entry(stop=400, shape=[100])}),
    "overlap": file_of({"a": entry(), "b": entry()}),
    "reversed": file_of({"a": entry(4, 0)}),
    "infinite offset": file_of(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}'),
    "huge size": file_of({"a": entry(shape=[2**62])}),
    "true in a shape": file_of({"a": entry(shape=[True])}),
    "shape and bytes": file_of({"a": entry(shape=[2])}),
    "unknown dtype": file_of({"a": entry(dtype="F4")}),
    "missing key": file_of({"a": {"dtype": "F32", "shape": [1]}}),
    "name twice": file_of(b'{"a":1,"a":2}'),
    "no JSON": file_of(b"{'a': 1}"),
    "nested": file_of(b"[" * 200_000),
    "long name": file_of({"a" * 1001: entry()}),
    "many axes": file_of({"a": entry(shape=[1] * 17)}),
    "nothing of much": file_of({"a": entry(0, 0, shape=[0, 2**63])}, b""),
    "three offsets": file_of({"a": entry() | {"data_offsets": [0, 4, 4]}}),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}}, b""),
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
}


@pytest.mark.parametrize("case", LIES.values(), ids=LIES.keys())
def test_header_that_lies(case: bytes, tmp_path: Path) -> None:
    refused(tmp_path, case)


SIZES = {1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ", 2: "I16 U16 F16 BF16",
         4: "I32 U32 F32", 8: "I64 U64 F64"}  # fmt: skip


def test_headers_just_inside_the_limits_and_every_dtype(tmp_path: Path) -> None:
    inside = [{"a" * 1000: entry()}, {"a": entry(shape=[1] * 16)}]
    inside += [{"a": entry(0, 0, shape=[0, 2**63 - 1])}]
    inside += [{"a": entry(0, n, name)} for n, names in SIZES.items() for name in names.split()]
    for header in inside:
        ((_, *stop),) = (each["data_offsets"] for each in header.values())
        (tmp_path / "x.safetensors").write_bytes(file_of(header, bytes(*stop)))
        assert len(read_header(tmp_path, "x.safetensors").tensors) == 1


@pytest.mark.parametrize("name", ["absent", "folder"])
def test_unreadable_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot be read: .*\n  fix: check the draft folder"):
        read_header(tmp_path, name)
