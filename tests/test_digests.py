"""Digests carry their algorithm; folders whose records have SHA-256 are judged as before."""

import hashlib
import json
from pathlib import Path

import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.digests import Digest, algorithm_of, has_identity
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.quantize.verify import verify
from draftquant.scripts.cli import main
from draftquant.validate.judging.candidate_origin import DraftFolder, check_folders
from tiny import read_tensors, tiny_eagle3_llama, write_tensors
from verify_cases import flip_bit, reseal


def sha256_of(folder: Path) -> dict[str, str]:
    return {n: hashlib.sha256(t.data).hexdigest() for n, t in read_tensors(folder).items()}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`draft`, and `out` as version 0.2 wrote it: its record has SHA-256, by names of that time."""
    folder = tmp_path_factory.mktemp("old")
    tiny_eagle3_llama(folder / "draft")
    arguments = ["quantize", str(folder / "draft"), "--recipe", "int4-channel", "--backend"]
    assert main([*arguments, "torch", "--out", str(folder / "out")]) == 0

    record = json.loads((folder / "out" / "draftquant.json").read_text(encoding="utf-8"))
    for held, of in ((record, "out"), (record["source"], "draft")):
        del held["tensor_digests"]
        held["tensor_sha256"] = sha256_of(folder / of)
    (folder / "out" / "draftquant.json").write_text(json.dumps(record), encoding="utf-8")
    reseal(folder / "out")
    return folder


def test_the_algorithm_stands_in_front() -> None:
    """The digest of no bytes is that of the BLAKE3 paper's test vectors."""
    found = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert str(Digest()) == f"blake3:{found}"
    digest = Digest()
    digest.update(memoryview(b"ab"))
    other = digest.copy()
    other.update(memoryview(b"c"))
    assert str(other) == "blake3:6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert str(digest) != str(other)
    assert str(Digest("sha256")) == hashlib.sha256().hexdigest()
    assert algorithm_of({}) == algorithm_of({"a": "00", "b": str(Digest())}) == "blake3"
    assert algorithm_of({"a": "00"}) == "sha256"


def test_a_folder_of_an_earlier_version_still_verifies(old: Path, tmp_path: Path) -> None:
    report = verify(old / "out", old / "draft")
    assert report.faults == ()
    assert report.output_digests == sha256_of(old / "out")
    name = "embed_tokens.weight"
    for file in ("config.json", "draftquant.json", "README.md"):
        (tmp_path / file).write_bytes((old / "out" / file).read_bytes())
    tensors = read_tensors(old / "out")
    changed = {name: flip_bit(tensors[name], 5)}
    write_tensors(tmp_path, tensors | changed, metadata={"format": "pt"})
    report = verify(tmp_path, old / "draft")
    faults = [fault.where for fault in report.faults if "tokenizer" not in fault.where]
    assert faults == [name, f"draftquant.json: tensor_digests.{name}"]


def test_it_is_judged_under_the_identity_that_it_had(old: Path) -> None:
    baseline, candidate = DraftFolder.read(old / "draft"), DraftFolder.read(old / "out")
    assert check_folders(baseline, candidate) == ()
    lines = "".join(f"{n} {digest}\n" for n, digest in sorted(sha256_of(old / "out").items()))
    assert candidate.sha256 == hashlib.sha256(lines.encode()).hexdigest()
    before = "".join(f"{n} {digest}\n" for n, digest in sorted(sha256_of(old / "draft").items()))
    assert baseline.is_identity(hashlib.sha256(before.encode()).hexdigest())
    assert baseline.is_identity(baseline.sha256)
    assert not baseline.is_identity(candidate.sha256)
    assert not has_identity(Checkpoint.open(old / "draft"), candidate.sha256)


@pytest.mark.parametrize("verb", ["transcode", "dequantize"])
def test_what_is_made_of_it_goes_on_in_its_algorithm(old: Path, verb: str, tmp_path: Path) -> None:
    """One record has one algorithm, so that kept tensors have one digest on both sides."""
    how = ["--layout", "quark"] if verb == "transcode" else []
    assert main([verb, str(old / "out"), "--out", str(tmp_path / "made"), *how]) == 0
    record = read_provenance(tmp_path / "made")
    assert record is not None
    assert record.digests == record.tensor_digests == sha256_of(tmp_path / "made")
    assert record.tensor_sha256 == {}
    assert verb == "dequantize" or verify(tmp_path / "made", old / "draft").faults == ()
