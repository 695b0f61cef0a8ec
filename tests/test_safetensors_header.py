"""The safetensors header as hostile input, and a golden file worked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.files.safetensors_header import read_header
from draftquant.recipes.errors import CheckpointError
from safetensors.torch import save

# Two tensors: BF16 1.0 and -2.0, then the bytes 1 and 2.
GOLDEN_HEADER = (
    b'{"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},'
    b'"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}'
)
GOLDEN = len(GOLDEN_HEADER).to_bytes(8, "little") + GOLDEN_HEADER + b"\x80\x3f\x00\xc0\x01\x02"


def entry(
    start: Any = 0, stop: Any = 4, dtype: Any = "F32", shape: Any = (1,), **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop], **more}


def file_of(header: object, data: bytes = bytes(4)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def refused(folder: Path, content: bytes, what: str) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(folder, "x.safetensors")
    assert caught.value.where == str(path)
    assert what in caught.value.what
    assert len(str(caught.value)) < 500
    assert caught.value.fix


def test_golden_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(GOLDEN)
    header = read_header(tmp_path, "x.safetensors")
    first = 8 + len(GOLDEN_HEADER)
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
    found = {t.name: (t.dtype, t.shape) for t in header.tensors}
    assert found == {
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
        what = "does not fit a file" if size < 8 + len(GOLDEN_HEADER) else "truncated"
        refused(tmp_path, GOLDEN[:size], what if size else "the file is empty (0 bytes)")


def test_length_that_lies(tmp_path: Path) -> None:
    for length in (10**6, 10**8 + 1, 2**63, 2**64 - 1):
        content = length.to_bytes(8, "little") + GOLDEN[8:]
        refused(tmp_path, content, f"header of {length} bytes does not fit")


LIES = {
    "bytes after the data": (file_of({"a": entry()}, bytes(5)), "bytes that no tensor owns"),
    "beyond the file": (file_of({"a": entry(stop=400, shape=[100])}), "truncated"),
    "overlap": (file_of({"a": entry(), "b": entry()}), "overlaps the tensor before it"),
    "reversed": (file_of({"a": entry(4, 0)}), "data_offsets [4, 0] is not a byte range"),
    "infinite offset": (file_of(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}'), ""),
    "huge size": (file_of({"a": entry(shape=[2**62])}), "needs 18446744073709551616 bytes"),
    "shape and bytes": (file_of({"a": entry(shape=[2])}), "F32 [2] needs 8 bytes, data_offsets"),
    "unknown dtype": (file_of({"a": entry(dtype="F4")}), "a: dtype 'F4' is not one of BOOL"),
    "missing key": (file_of({"a": {"dtype": "F32", "shape": [1]}}), "a: expected exactly dtype"),
    "name twice": (file_of(b'{"a":1,"a":2}'), "'a' stands twice in the header"),
    "no JSON": (file_of(b"{'a': 1}"), "the header is not JSON"),
    "nested": (file_of(b"[" * 200_000), "the header is not JSON"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}, b""), "__metadata__ is not"),
    "a pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "is a pointer of Git LFS",
    ),
}


@pytest.mark.parametrize("case", LIES.values(), ids=LIES.keys())
def test_header_that_lies(case: tuple[bytes, str], tmp_path: Path) -> None:
    refused(tmp_path, *case)


@pytest.mark.parametrize("name", ["absent", "folder"])
def test_unreadable_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot be read: .*\n  fix: check the draft folder"):
        read_header(tmp_path, name)
