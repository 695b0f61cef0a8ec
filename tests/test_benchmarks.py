"""Each benchmark runs on something small, and its rows say what they should."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from draftquant import api as dq
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.scripts.dev.real_shapes.generate import write_real_shape_draft
from draftquant.scripts.dev.real_shapes.traces import TraceSize, write_traces
from draftquant.scripts.verbs.gate import gate as judge
from tiny_dflash import tiny_dflash

from benchmarks import gate, peers, quality, quantize, record, replay
from benchmarks.measured_process import BenchError, draftquant, run_measured

pytestmark = pytest.mark.slow

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
Printed = pytest.CaptureFixture[str]


def rows(
    printed: Printed, main: Callable[[Sequence[str]], int], *arguments: str
) -> list[dict[str, Any]]:
    printed.readouterr()
    assert main([*arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(printed.readouterr().out)
    return found


def test_quantizing_is_measured_beside_cp(tmp_path: Path, capsys: Printed) -> None:
    asked = [str(tmp_path), "--divide", "64", "--rounds", "2", "--recipes", "int4-channel"]
    copied, quantized = rows(capsys, quantize.main, *asked)
    assert (copied["name"], copied["copies"], copied["write_seconds"]) == ("cp and sync", 1, None)
    assert quantized["write_seconds"] + quantized["verify_seconds"] < quantized["wall_seconds"]
    assert quantized["bytes_out"] < copied["bytes_out"]
    assert [path.name for path in tmp_path.iterdir()] == ["kimi-k2.5-eagle3-64"]
    assert quantize.main([*asked[:-1], "none"]) == 2
    (tmp_path / "measured").mkdir()
    assert quantize.main(asked) == 2
    assert "exists already" in capsys.readouterr().err


def test_tools_that_run_and_tools_that_do_not(tmp_path: Path, capsys: Printed) -> None:
    source, work = tiny_dflash(tmp_path / "draft"), tmp_path / "work"
    pythons = [f"--python={name}=/bin/false" for name in peers.PEERS]
    asked = [str(work), "--given", str(source), "--schemes", "fp8", *pythons]
    ours, *others = rows(capsys, peers.main, *asked)
    assert (ours["tool"], ours["found"]) == ("draftquant", "verified")
    assert ours["bytes_out"] > 0 < ours["cpu_seconds"]
    assert [row["found"] for row in others] == ["ended with status 1"] * len(peers.PEERS)
    assert list(work.iterdir()) == []
    with pytest.raises(SystemExit):
        peers.main([str(work), "--python", "other=/bin/false"])
    assert "expected NAME=PATH" in capsys.readouterr().err


def test_recording_and_generate_continue_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(record, "TARGETS", {"small": shape})
    asked = ["--rounds", "1", "--prompts", "8", "--device", "cpu", "--load", "ragged"]
    (found,) = rows(capsys, record.main, str(tmp_path), *asked)
    assert found["tokens"] == sum(range(32, 64, 4)) + 8 * 64
    assert found["ratio"] > 0
    _, ragged, chat = record.loads(64)
    assert (min(ragged.lengths), max(ragged.lengths)) == (32, 63)
    assert (min(chat.lengths), max(chat.lengths)) == (16, 1024)


def test_a_small_pair_is_replayed(tmp_path: Path, capsys: Printed) -> None:
    asked = [str(tmp_path), "--divide", "64", "--prompts", "2", "--tokens", "48"]
    few = [*asked, "--device", "cpu", "--dtype", "float32"]
    found = rows(capsys, replay.main, *few)
    assert [row["name"] for row in found] == [
        "float32, K = 3, one prompt at a time",
        "float32, K = 3, prompts together",
    ]
    for row in found:
        assert row["tokens"] == 2 * 2 * 48
        assert min(row["seconds"], row["load_seconds"], row["share_of_gemm"]) > 0
        assert row["peak_bytes"] > 100 * 2**20
        assert row["estimated_bytes"] > 0
    assert replay.main([*few, "--device", "none", "--batch-size", "0"]) == 1
    assert "none" in capsys.readouterr().out
    assert replay.main([*asked, "--recipe", "none"]) == 2
    assert "quantize: failed" in capsys.readouterr().err


@pytest.mark.parametrize("name", replay.WHOLE)
def test_a_draft_of_random_weights_accepts_some_of_the_text_that_is_made_for_it(
    tmp_path: Path, name: str
) -> None:
    write_real_shape_draft(tmp_path / "draft", draft=name, divide=16)
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_traces(
            tmp_path / "draft", tmp_path / folder, TraceSize(prompts=4, tokens=96, seed=seed)
        )
    (found,) = dq.replay([tmp_path / "draft"], tmp_path / "a", dtype="bfloat16")
    assert 2 < found.counts.mean_acceptance_length < 3.8
    a, b, c = (TraceFolder.open(tmp_path / folder).manifest.shards[0].sha256 for folder in "abc")
    assert a == b != c


def test_a_draft_is_quantized_and_judged(tmp_path: Path, capsys: Printed) -> None:
    """As `gate` judges it; what is there already is used again."""
    pair = tmp_path / "pair"
    shutil.copytree(PAIR, pair)
    for name in ("prompts.jsonl", "calibration.jsonl"):
        lines = (pair / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (pair / name).write_text("".join(lines[:6]), encoding="utf-8")
    asked = [str(tmp_path / "work"), "--pair", str(pair), "--recipe", "int4-channel"]
    work = tmp_path / "work" / "pair"
    for algorithm, cost in (("recipe", 0.12), ("gptq", 0.15)):
        (row,) = rows(capsys, quality.main, *asked, "--algorithm", algorithm)
        assert row["cost"]["weight_error"] == pytest.approx(cost, abs=0.02)
        report = judge(PAIR / "draft", work / f"int4-channel-{algorithm}", work / "traces-prompts")
        assert report.change is not None
        assert row["verdict"] == report.verdict
        assert row["change"] == pytest.approx(report.change.relative_change)
        assert row["lower"] < row["change"] < row["upper"]
        assert 5e-5 < row["divergence"] < 5e-3
    assert rows(capsys, quality.main, *asked, "--algorithm", "gptq") == [row]
    assert quality.divergence(PAIR / "draft", PAIR / "draft", work / "traces-prompts") == 0
    assert quality.main([str(tmp_path), "--pair", str(tmp_path / "none")]) == 2
    assert "is no trained pair" in capsys.readouterr().err


def simulated(group: str, name: str, runs: int = 60) -> gate.Row:
    """A few dozen seeded runs tell rates that lie far apart; the figures need two thousand."""
    return gate.simulated(name, gate.SCENARIOS[group]()[name], runs, 0)


def test_the_gate_is_simulated() -> None:
    assert simulated("changes", "true change -2.0%").passed <= 0.05
    assert simulated("changes", "true change +0.0%").passed > 0.8
    assert simulated("losses", "100 prompts, -1.0%, who loses: a twentieth").lower_covers > 0.85
    assert simulated("together", "one prompt 40 times, -4.8%").inconclusive == 1
    assert simulated("together", "one prompt 40 times, disguised, -4.8%").anomalous > 0.8
    groups = "300 prompts in groups of five, -1.0%"
    assert simulated("together", f"{groups}, each as one", 300).passed > 0.07  # 0.05 is promised
    assert simulated("together", f"{groups}, as groups", 300).passed < 0.09
    lost = simulated("categories", "10 categories, one loses 4%")
    assert lost.passed < 0.75
    assert lost.part_found > 0.8
    assert simulated("categories", "10 categories, each loses 1%").part_found <= 0.05
    assert simulated("contexts", "longest bin loses 8%").failed > 0.95
    plain = simulated("looks", "3 looks, unplanned, +0.0%").passed
    assert plain > simulated("looks", "1 look, +0.0%").passed + 0.1


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(BenchError, match="quantize: failed") as caught:
        draftquant("quantize", "nowhere", "--recipe", "int4-channel", "--out", "out")
    assert any("nowhere" in line for line in caught.value.details)
    assert run_measured("/bin/false").error == "ended with status 1"
