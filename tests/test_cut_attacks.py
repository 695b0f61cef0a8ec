"""`verify` of a cut vocabulary against those who change a folder and its record alike."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuts import IDS, cut
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.digests import tensor_digests
from draftquant.quantize.verify import verify
from tiny import edit_json, tiny_eagle3_llama
from tiny_dspark import tiny_dspark
from verify_cases import Tensors, edit, faults_of, quantized_folder, reseal

pytestmark = pytest.mark.usefixtures("one_thread")
HEAD, SECOND = "lm_head.weight", "markov_head.markov_w2.weight"
Change = Callable[[Tensors], Any]


def digested(folder: Path) -> None:
    """The record names the tensors that are there, and has its seal."""
    edit_json(folder / "draftquant.json", tensor_digests=tensor_digests(Checkpoint.open(folder)))
    reseal(folder)


def swapped(tensors: Tensors, name: str) -> None:
    """Rows 4 and 7."""
    tensor = tensors[name]
    width = len(tensor.data) // tensor.shape[0]
    rows = [tensor.data[i : i + width] for i in range(0, len(tensor.data), width)]
    rows[4], rows[7] = rows[7], rows[4]
    tensors[name] = tensor._replace(data=b"".join(rows))


def offset(tensors: Tensors, draft_id: int, by: int) -> None:
    values = np.frombuffer(tensors["d2t"].data, "<i8").copy()
    values[draft_id] += by
    tensors["d2t"] = tensors["d2t"]._replace(data=values.tobytes())


def marked(tensors: Tensors, token: int) -> None:
    data = bytearray(tensors["t2d"].data)
    data[token] ^= 1
    tensors["t2d"] = tensors["t2d"]._replace(data=bytes(data))


def moved(tensors: Tensors) -> None:
    """A row is said to be of the next token, in both maps."""
    offset(tensors, 5, 1)
    marked(tensors, IDS[5])
    marked(tensors, IDS[5] + 1)


ATTACKS: dict[str, tuple[Change, str, str]] = {
    "rows swapped": (
        lambda t: swapped(t, HEAD), HEAD, "expected the source's bytes of target id 15, got"
        " others in row 4"
    ),
    "mask off by one bit": (lambda t: marked(t, 50), "t2d", "1 different byte(s), first at"),
    "token off by one in both maps": (lambda t: moved(t), HEAD, "bytes of target id 19"),
    "a token twice": (lambda t: offset(t, 5, -3), "d2t", "target id 15 of draft id 5 behind 15"),
    "out of the vocabulary": (lambda t: offset(t, 19, 40), "d2t", "100 of draft id 19"),
    "second table cut otherwise": (
        lambda t: swapped(t, SECOND), SECOND, "bytes of target id 15, got others in row 4"
    ),
    "no mask": (lambda t: t.pop("t2d"), "t2d", "expected BOOL [96], got none"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A DSpark draft, which has two tables with a row for each token, and its cut."""
    root = tmp_path_factory.mktemp("attacks")
    source = tiny_dspark(root / "draft", head=True)
    cut(source, root / "cut")
    return source, root / "cut"


@pytest.mark.parametrize("name", ATTACKS)
def test_a_wrong_byte_is_found_whatever_the_record_says(
    name: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    source, good = folders
    change, where, what = ATTACKS[name]
    out = Path(shutil.copytree(good, tmp_path / "out"))
    edit(out, change)
    digested(out)
    faults = [fault for fault in verify(out, source).faults if fault.where == where]
    assert faults
    assert what in str(faults[0])


RECORDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "size": (lambda d: d["cuts"][0].update(size=21), "cuts[0].size: expected 20, got 21"),
    "convention": (lambda d: d["cuts"][0].update(convention="ids"), "expected 'offsets', got 'ids"),
    "lent head": (
        lambda d: d["cuts"][0].update(head_from={"tensor": "lm_head.weight", "digest": "0"}),
        "head_from: expected None, got lm_head.weight",
    ),
    "source": (
        lambda d: d["cuts"][0]["source"]["tensor_digests"].update({HEAD: "blake3:0"}),
        "source.tensor_digests.lm_head.weight",
    ),
    "an earlier cut": (
        lambda d: d["cuts"].insert(0, d["cuts"][0]), "expected the source's 0 earlier cut(s)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_wrong_record_is_found(name: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, good = folders
    change, what = RECORDS[name]
    out = Path(shutil.copytree(good, tmp_path / "out"))
    content = json.loads((out / "draftquant.json").read_text(encoding="utf-8"))
    change(content)
    (out / "draftquant.json").write_text(json.dumps(content), encoding="utf-8")
    reseal(out)
    assert what in faults_of(verify(out, source))


def test_rows_and_record_of_a_quantized_head_are_held_against_both(tmp_path: Path) -> None:
    """The record of the quantized folder, which says who calibrated it, is carried on."""
    source = tiny_eagle3_llama(tmp_path / "draft")
    quantized, out = quantized_folder(source, tmp_path / "fp8", "fp8-ptpc"), tmp_path / "cut"
    cut(quantized, out)
    edit(out, lambda tensors: swapped(tensors, HEAD))
    digested(out)
    assert "bytes of target id 15, got others in row 4" in faults_of(verify(out, quantized))
    assert "lm_head.weight: expected the source's bytes" in faults_of(verify(out, source))
    content = json.loads((out / "draftquant.json").read_text(encoding="utf-8"))
    content["quantized_by"]["backend_versions"] = {}
    (out / "draftquant.json").write_text(json.dumps(content), encoding="utf-8")
    reseal(out)
    assert "quantized_by: expected the source's record" in faults_of(verify(out, quantized))
    assert "quantized_by.sha256" in faults_of(verify(out, source))
