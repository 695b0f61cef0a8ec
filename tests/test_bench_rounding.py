"""bench_rounding: both algorithms on a small draft of a real shape, and bad input."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from draftquant.scripts.dev.bench_rounding import Row, main, print_rows

pytestmark = pytest.mark.slow


def test_both_algorithms_are_measured_and_nothing_is_left_but_what_is_measured_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--divide", "32", "--prompts", "8", "--tokens", "24", "--steps", "3")
    assert main([str(tmp_path), *small, "--json"]) == 0
    gptq, learned = json.loads(capsys.readouterr().out)
    assert (gptq["what"], learned["what"]) == ("gptq", "learned, 3 steps")
    assert gptq["step_seconds"] is None
    for row in (gptq, learned):
        assert row["seconds"] > 0
        assert row["cpu_seconds"] > 0
        assert row["peak_bytes"] > 100e6
    assert 0 < learned["step_seconds"] < learned["seconds"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["kimi-k2.5-eagle3-32", "traces-32-8x24"]


def test_rows_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(what="gptq", seconds=12.3, cpu_seconds=45.6, peak_bytes=7_890_000_000)
    asked = Namespace(draft="a draft", divide=4, recipe="int4-channel", prompts=32)
    print_rows(asked, [row])
    said = capsys.readouterr().out
    assert "a draft / 4, int4-channel, 32 prompts" in said
    assert "7.89" in said
    assert "46" in said


def test_bad_input_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--steps", "2"]) == 2
    assert "--steps: expected 0 or 3 and more, got 2" in capsys.readouterr().err
    assert main([str(tmp_path), "--draft", "nobody"]) == 2
    assert "invalid choice: 'nobody'" in capsys.readouterr().err
