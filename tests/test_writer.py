"""Writing safetensors files: golden bytes, order, alignment, copies."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from draftquant.quantize.files.safetensors_file import SafetensorsFile
from draftquant.quantize.files.safetensors_header import StoredTensor, TensorInfo
from draftquant.recipes.errors import CheckpointError
from safetensors import safe_open

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


def write_all(path: Path, tensors: Sequence[StoredTensor]) -> bytes:
    with SafetensorsFile(path, tensors, {"format": "pt"}) as file:
        for tensor in tensors:
            file.write(tensor.name, VALUES[tensor.name])
    return path.read_bytes()


def padded(header: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def test_golden_bytes(tmp_path: Path) -> None:
    content = write_all(tmp_path / "x.safetensors", [A, B, C])
    assert content == padded(GOLDEN_HEADER) + GOLDEN_DATA
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
    def unsupported(*_arguments: object) -> int:
        raise OSError(error, "unsupported")

    monkeypatch.setattr(os, "copy_file_range", unsupported)


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
