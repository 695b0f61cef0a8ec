"""bench_features: a whole run on a few prompts, what it prints, and that it wants trained pairs."""

import shutil
from pathlib import Path

import pytest
from draftquant.scripts.dev import PAIRS
from draftquant.scripts.dev.bench_features import BF16, main, measured_pair, print_rows

pytestmark = pytest.mark.slow


def test_a_run_on_a_few_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = tmp_path / "pair"
    shutil.copytree(PAIRS / "eagle3-llama", pair)
    lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (pair / "prompts.jsonl").write_text("".join(lines[:4]), encoding="utf-8")
    rows = measured_pair(pair, tmp_path / "work", ["int4-channel"], 1, 0.95)
    exact, packed, rounded = rows
    assert [row.storage for row in rows] == ["exact", "zstd", "fp8-per-token"]
    assert (exact.bytes_ratio, exact.record, exact.write, exact.read, exact.replay) == (1,) * 5
    assert rounded.bytes_ratio < 0.52 < packed.bytes_ratio < 0.75
    for row in (exact, packed):  # without loss nothing changes, and says so without spread
        assert [(one.relative, one.lower, one.upper) for one in row.changes] == [(0, 0, 0)] * 3
    assert [(one.draft, one.of) for one in rounded.changes] == [
        (BF16, "length"), ("int4-channel", "length"), ("int4-channel", "verdict"),
    ]  # fmt: skip
    assert all(one.lower <= one.relative <= one.upper for one in rounded.changes)
    print_rows(rows)
    said = capsys.readouterr().out
    assert "fp8-per-token" in said
    assert "int4-channel" in said


def test_a_folder_that_is_no_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "work"), "--pair", str(tmp_path)]) == 2
    assert "is no trained pair" in capsys.readouterr().err
