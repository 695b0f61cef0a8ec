"""The benchmark of recording beside `generate`, with a target of two narrow layers."""

import json
from pathlib import Path

import pytest
from draftquant.scripts.dev import bench_record
from draftquant.scripts.dev.bench_record import loads, main

pytestmark = pytest.mark.slow


def test_loads_are_equal_ragged_and_of_a_chat() -> None:
    equal, ragged, chat = loads(64)
    assert set(equal.lengths) == {48}
    assert (min(ragged.lengths), max(ragged.lengths), len(set(ragged.lengths))) == (32, 63, 32)
    assert (min(chat.lengths), max(chat.lengths)) == (16, 1024)
    assert (min(chat.answers), max(chat.answers)) == (9, 256)
    assert list(chat.lengths) != sorted(chat.lengths)


def test_both_continue_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(bench_record, "TARGETS", {"small": shape})
    arguments = [str(tmp_path), "--rounds", "1", "--prompts", "8", "--device", "cpu"]
    assert main([*arguments, "--load", "ragged", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["target"], found["load"]) == ("small", "ragged")
    assert found["tokens"] == sum(range(32, 64, 4)) + 8 * 64
    assert found["ratio"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["target-small"]
    assert main([*arguments, "--load", "equal"]) == 0
    assert "record / generate" in capsys.readouterr().out
