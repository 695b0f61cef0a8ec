"""Digests carry their algorithm's name, and are of every byte."""

from pathlib import Path

import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.digests import Digest, tensor_digests
from tiny import tiny_eagle3_llama


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


def test_every_tensor_is_digested_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block, whatever their size."""
    checkpoint = Checkpoint.open(tiny_eagle3_llama(tmp_path / "draft"))
    whole = tensor_digests(checkpoint)
    monkeypatch.setattr("draftquant.quantize.files.checkpoint.BLOCK_BYTES", 1000)
    assert tensor_digests(checkpoint) == whole
