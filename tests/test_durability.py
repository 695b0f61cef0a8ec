"""What is published survives a power cut: every file and folder is on the disk before the rename.

`os.fsync` and `os.rename` are watched. A file counts as synced if it was after its last change.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from by_recipe import quantized
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces.writer import trace_output
from draftquant.quantize.converting.dequantize_draft import dequantize_draft
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.publish import Flushing
from draftquant.recipes.errors import OutputError
from test_traces import AUX, TARGET, TRACES
from tiny import tiny_eagle3_llama

Files = dict[tuple[int, int], tuple[int, int]]
"""Device and inode -> size and time of change when a file reached the disk."""


def seen(status: os.stat_result) -> Files:
    return {(status.st_dev, status.st_ino): (status.st_size, status.st_mtime_ns)}


@contextmanager
def nothing_is_lost(out: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A power cut after publishing may take nothing of the folder, nor its name."""
    synced: list[Files] = [{}]  # before each rename to the output, and after
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced[-1].update(seen(os.fstat(descriptor)))

    def watched_rename(source: Path, target: Path) -> None:
        if Path(target) == out:
            synced.append({})
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "rename", watched_rename)
        yield
    before, after = synced  # published by one rename
    for path in (out, *out.rglob("*")):
        assert seen(path.stat()).items() <= before.items(), path
    assert seen(out.parent.stat()).keys() <= after.keys()


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_eagle3_llama(tmp_path_factory.mktemp("durable") / "draft", sharded=True)
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "deep" / "deeper" / "notes.txt").write_text("travels too", encoding="utf-8")
    return folder


def test_a_quantized_draft(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_is_lost(tmp_path / "out", monkeypatch):
        quantized(draft, "blackwell-fp8", tmp_path / "out")
    assert {"deep", "hf_quant_config.json", "draftquant.json", "config.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }


def test_a_dequantized_draft(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized(draft, "blackwell-fp8", tmp_path / "packed")
    with nothing_is_lost(tmp_path / "out", monkeypatch):
        dequantize_draft(DraftSource(folder=tmp_path / "packed"), tmp_path / "out")


def test_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        nothing_is_lost(tmp_path / "out", monkeypatch),
        trace_output(tmp_path / "out", GREEDY.manifest(TARGET, AUX), shard_bytes=1) as writer,
    ):
        for position, trace in enumerate(TRACES):
            writer.add(trace, position=position)
    assert len(list((tmp_path / "out").iterdir())) == 1 + len(TRACES)


# ---- while it is written


def _fail(*_arguments: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_file_is_synced_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an early error is told where all is waited for: the kernel tells it once."""
    seen = threading.Event()

    def failing(_descriptor: int) -> None:
        seen.set()
        _fail()

    monkeypatch.setattr(os, "fdatasync", failing)
    with Flushing(tmp_path) as disk:
        (tmp_path / "file").write_bytes(b"x")
        assert seen.wait(10)
        disk.finish()
        with pytest.raises(OSError, match="Input/output error"):
            disk.wait()


def test_a_disk_that_fails_during_verification_publishes_nothing(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flushing, "_sync", _fail)
    with pytest.raises(OutputError, match="Input/output error"):
        quantized(draft, "int4-channel", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
