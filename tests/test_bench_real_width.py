"""The recommended way on a draft of a published shape, 64 times narrower."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.scripts.cli import main as draftquant
from draftquant.scripts.dev.bench_real_width import Stage, exponents, main
from draftquant.scripts.dev.real_shapes.generate import write_real_shape_draft, write_target
from draftquant.scripts.dev.real_shapes.traces import TraceSize, write_traces

pytestmark = pytest.mark.slow

SIZE = TraceSize(prompts=4, tokens=96, seed=1)


def test_an_exponent_is_the_slope_between_one_core_and_many() -> None:
    alone = Stage(name="a", wall_seconds=8, cpu_seconds=8, peak_bytes=1)
    halved, same = replace(alone, wall_seconds=4), alone
    assert exponents([alone], [halved], 2) == [1.0]
    assert exponents([alone], [same], 2) == [0.0]
    assert exponents([alone], [halved], 4) == [0.5]


@pytest.mark.parametrize("name", ["kimi-k2.5-eagle3", "kimi-k2.5-eagle3-mla"])
def test_a_chain_draft_accepts_some_of_the_text_that_is_made_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_real_shape_draft(tmp_path / "draft", draft=name, divide=16)
    write_traces(tmp_path / "draft", tmp_path / "traces", SIZE)
    replayed = _replayed(tmp_path, capsys)
    assert 2 < replayed["mean_acceptance_length"] < 3.8
    first, *deeper = replayed["survival"]
    assert 0.6 < first < 0.99
    assert deeper[0] < first


def test_a_block_draft_accepts_what_it_proposed_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_real_shape_draft(tmp_path / "draft", draft="kimi-linear-dflash", divide=16)
    write_target(tmp_path / "target", "kimi-linear-dflash", divide=16)
    write_traces(tmp_path / "draft", tmp_path / "traces", SIZE, target=tmp_path / "target")
    survival = _replayed(tmp_path, capsys)["survival"]
    assert survival[0] > 0.4
    assert survival[3] > 0  # as many as a block's text takes over
    assert sum(survival[4:]) < 0.01  # behind them the text is random


def test_texts_of_other_seeds_are_other_texts(tmp_path: Path) -> None:
    write_real_shape_draft(tmp_path / "draft", draft="kimi-k2.5-eagle3", divide=64)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_traces(tmp_path / "draft", tmp_path / name, replace(SIZE, seed=seed))
    a, b, c = (TraceFolder.open(tmp_path / name).manifest for name in "abc")
    assert a.shards[0].sha256 == b.shards[0].sha256
    assert a.shards[0].sha256 != c.shards[0].sha256


def test_every_stage_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(tmp_path), "--divide", "64", "--prompts", "3", "--tokens", "128", "--cores", "1"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    stages = {one["name"]: one for one in found}
    assert list(stages) == [
        f"{what} {recipe}"
        for recipe in ("int4-channel-gptq", "int4-channel")
        for what in ("quantize", "verify", "gate")
    ]
    assert stages["quantize int4-channel-gptq"]["parts"]["measure"] > 0
    assert stages["verify int4-channel"]["result"] == "verified"
    assert "->" in stages["gate int4-channel-gptq"]["result"]
    assert all(math.isfinite(one["wall_seconds"]) and one["peak_bytes"] for one in found)
    assert not list(tmp_path.glob("*gptq")), "outputs are deleted"


def _replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    arguments = ("--traces", str(folder / "traces"), "--dtype", "bfloat16", "--json", "--quiet")
    assert draftquant(["replay", str(folder / "draft"), *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)[0]
    return found
