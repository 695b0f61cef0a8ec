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


class Disk:
    """What has reached the disk, by device and inode: size and time of change when it did."""

    def __init__(self) -> None:
        self.synced: dict[tuple[int, int], tuple[int, int]] = {}
        self.synced_before: dict[tuple[int, int], tuple[int, int]] | None = None
        """As it was when the output got its name."""


def change_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@contextmanager
def watched(out: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk, fsync, rename = Disk(), os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        disk.synced[identity(status)] = change_of(status)

    def watched_rename(source: Path, target: Path) -> None:
        if Path(target) == out:
            disk.synced_before, disk.synced = dict(disk.synced), {}
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "rename", watched_rename)
        yield disk


def lost(out: Path, disk: Disk) -> set[str]:
    """What a power cut after publishing may take; "." and ".." are the folder and its name."""
    assert disk.synced_before is not None, "published by one rename"
    found = {
        str(path.relative_to(out))
        for path in (out, *out.rglob("*"))
        if disk.synced_before.get(identity(path.stat())) != change_of(path.stat())
    }
    return found if identity(out.parent.stat()) in disk.synced else found | {".."}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_eagle3_llama(tmp_path_factory.mktemp("durable") / "draft", sharded=True)
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "deep" / "deeper" / "notes.txt").write_text("travels too", encoding="utf-8")
    return folder


def test_a_quantized_draft(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(tmp_path / "out", monkeypatch) as disk:
        quantized(draft, "blackwell-fp8", tmp_path / "out")
    assert {"deep", "hf_quant_config.json", "draftquant.json", "config.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert lost(tmp_path / "out", disk) == set()


def test_a_dequantized_draft(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized(draft, "blackwell-fp8", tmp_path / "packed")
    with watched(tmp_path / "out", monkeypatch) as disk:
        dequantize_draft(DraftSource(folder=tmp_path / "packed"), tmp_path / "out")
    assert lost(tmp_path / "out", disk) == set()


def test_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        watched(tmp_path / "out", monkeypatch) as disk,
        trace_output(tmp_path / "out", GREEDY.manifest(TARGET, AUX), shard_bytes=1) as writer,
    ):
        for position, trace in enumerate(TRACES):
            writer.add(trace, position=position)
    assert len(list((tmp_path / "out").iterdir())) == 1 + len(TRACES)
    assert lost(tmp_path / "out", disk) == set()


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
