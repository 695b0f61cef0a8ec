"""What is published survives a power cut: every file and folder is on the disk before the rename.

`os.fsync` and `os.rename` are watched. A file counts as synced if it was after its last change.
"""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces.writer import trace_output
from draftquant.quantize.converting.dequantize_draft import dequantize_draft
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import Measured, make_plan
from draftquant.recipes import load_recipe
from test_traces import AUX, TARGET, TRACES
from tiny import edit_json, tiny_eagle3_llama


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


def quantized(draft: Path, out: Path) -> None:
    recipe = dataclasses.replace(load_recipe("blackwell-fp8"), backend="torch")
    plan = make_plan(recipe, read_draft(Checkpoint.open(draft)))
    scales = {step.row.module: 0.25 for step in plan.quantized}
    quantize_draft(
        plan, out, source=DraftSource(folder=draft), measured=Measured(input_scales=scales)
    )


def test_a_quantized_draft(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(tmp_path / "out", monkeypatch) as disk:
        quantized(draft, tmp_path / "out")
    assert {"deep", "hf_quant_config.json", "draftquant.json", "config.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert lost(tmp_path / "out", disk) == set()


def test_a_dequantized_draft(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized(draft, tmp_path / "packed")
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


def test_this_test_sees_what_was_not_synced(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(tmp_path / "out", monkeypatch) as disk:
        quantized(draft, tmp_path / "out")
    edit_json(tmp_path / "out" / "config.json", rms_norm_eps=1)
    shutil.rmtree(tmp_path / "out" / "deep" / "deeper")
    assert lost(tmp_path / "out", disk) == {"config.json", "deep"}
    disk.synced.clear()
    assert lost(tmp_path / "out", disk) == {"config.json", "deep", ".."}
