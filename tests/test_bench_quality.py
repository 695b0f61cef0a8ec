"""bench_quality: its rows, what it asks of `quantize`, and what it says where something fails."""

import json
from pathlib import Path

import pytest
from draftquant.scripts.bench_quality import BenchError, Change, Row, main, print_rows
from draftquant.scripts.bench_quality import _chosen as chosen
from draftquant.scripts.bench_quality import _draftquant as draftquant
from draftquant.scripts.bench_quality import _needed as needed
from draftquant.scripts.bench_quality import _write_prompts as write_prompts

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
CHANGE = Change(relative=-0.0012, lower=-0.004, upper=0.0017, verdict="PASS")


def test_a_row_is_printed_with_both_changes(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        pair="eagle3-llama",
        recipe="int4-channel",
        algorithm="gptq",
        weight_error=0.1534,
        agreement=0.975,
        acceptance_length=2.8993,
        greedy=CHANGE,
        drawn=Change(relative=-0.02, lower=-0.03, upper=-0.015, verdict="FAIL"),
        cpu_seconds=4.2,
        peak_bytes=512_000_000,
    )
    print_rows([row])
    said = " ".join(capsys.readouterr().out.split())
    for word in ("0.1534", "97.50%", "2.8993", "-0.12% (-0.40%, +0.17%) PASS", "FAIL", "512"):
        assert word in said, said


def test_traces_are_given_where_inputs_are_measured() -> None:
    traces = Path("t")
    assert needed("int4-channel", "absmax", traces) == ()
    assert needed("int4-channel", "gptq", traces) == ("--traces", "t")
    assert needed("blackwell-nvfp4", "absmax", traces) == ("--traces", "t")
    assert needed("int4-channel", "quark:gptq", traces) == ("--traces", "t")
    assert needed("fp8-ptpc", "modelopt:mse", traces) == ()


def test_an_algorithm_is_that_of_the_backend_before_it() -> None:
    assert chosen("gptq") == ("--algorithm", "gptq", "--backend", "torch")
    assert chosen("quark:gptq") == ("--algorithm", "gptq", "--backend", "quark")


def test_without_more_the_prompts_are_the_shipped_ones(tmp_path: Path) -> None:
    write_prompts(PAIR, tmp_path / "p.jsonl", 0)
    found = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    shipped = [json.loads(line) for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    assert found == shipped


def test_the_peak_is_that_of_the_command_and_not_of_who_runs_it() -> None:
    held = bytearray(b"x") * 400_000_000
    taken = draftquant("recipes", "list")
    assert len(held) > 2 * taken.peak_bytes > 0
    assert 0 < taken.seconds < 60


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(BenchError, match="quantize: failed") as caught:
        draftquant("quantize", "nowhere", "--recipe", "int4-channel", "--out", "out")
    assert any("nowhere" in line for line in caught.value.details)


def test_a_pair_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "work"), "--pair", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
