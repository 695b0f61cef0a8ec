"""What is written reaches the disk early, all of it before it is published; no error is lost."""

import os
import threading
import time
from pathlib import Path

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.publish import Flushing
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import OutputError
from tiny import tiny_eagle3_llama


def test_a_file_is_synced_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: seen.set())
    (tmp_path / "deep").mkdir()
    with Flushing(tmp_path):
        (tmp_path / "deep" / "file").write_bytes(b"x")
        assert seen.wait(10)


def test_every_file_is_synced_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with Flushing(tmp_path) as disk:
        for name in "ab":
            (tmp_path / name).write_bytes(b"x")
        disk.finish()
        disk.wait()
    assert sorted(synced) == sorted((tmp_path / name).stat().st_ino for name in "ab")


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_an_error_of_the_disk_is_told_where_all_is_waited_for(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An early one too: the kernel tells it once."""

    def failing(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, failing)
    (tmp_path / "file").write_bytes(b"x")
    with Flushing(tmp_path) as disk:
        if call == "fdatasync":
            time.sleep(0.3)
        disk.finish()
        with pytest.raises(OSError, match="Input/output error"):
            disk.wait()


def test_a_disk_that_fails_during_verification_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft")
    plan = make_plan(load_recipe("int4-channel"), read_draft(Checkpoint.open(folder)))
    monkeypatch.setattr(Flushing, "_sync", _fail)
    with pytest.raises(OutputError, match="Input/output error"):
        quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=folder))
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def _fail(*_arguments: object) -> None:
    raise OSError(5, "Input/output error")
