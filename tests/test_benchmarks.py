"""Each benchmark runs on something small, and its rows say what they should."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gate, quantize, replay

pytestmark = pytest.mark.slow

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


def test_a_small_pair_is_replayed(tmp_path: Path, capsys: Printed) -> None:
    asked = [str(tmp_path), "--divide", "64", "--prompts", "2", "--tokens", "48"]
    found = rows(capsys, replay.main, *[*asked, "--device", "cpu", "--dtype", "float32"])
    assert [row["name"].partition(", K = 3, ")[2] for row in found] == [
        "one prompt at a time", "prompts together",
    ]  # fmt: skip
    for row in found:
        assert row["tokens"] == 2 * 2 * 48
        assert min(row["seconds"], row["load_seconds"], row["share_of_gemm"]) > 0
        assert min(row["peak_bytes"], row["estimated_bytes"]) > 0
    assert replay.main([*asked, "--recipe", "none"]) == 2
    assert "quantize: failed" in capsys.readouterr().err


def simulated(group: str, name: str, runs: int = 60) -> gate.Row:
    """A few dozen seeded runs tell rates that lie far apart; the figures need two thousand."""
    return gate.simulated(name, gate.SCENARIOS[group]()[name], runs, 0)


def test_the_gate_is_simulated() -> None:
    assert simulated("changes", "true change -2.0%").passed <= 0.05
    assert simulated("changes", "true change +0.0%").passed > 0.8
    assert simulated("losses", "100 prompts, -1.0%, who loses: a twentieth").lower_covers > 0.85
    assert simulated("together", "one prompt 40 times, -4.8%").inconclusive == 1
    groups = "300 prompts in groups of five, -1.0%"
    assert simulated("together", f"{groups}, each as one", 300).passed > 0.07  # 0.05 is promised
    assert simulated("together", f"{groups}, as groups", 300).passed < 0.09
    seen = "the 20% that lose most were seen, -1.0%"
    assert simulated("recited", f"{seen}, without them").passed > 0.8
    assert simulated("recited", f"{seen}, the gate").passed < 0.1
    limit = "of 8 recipes at -1.0%, on"
    assert simulated("chosen", f"{limit} fresh prompts", 20).passed < 0.15
    assert simulated("chosen", f"{limit} those that chose", 20).passed > 0.2
    lost = simulated("categories", "10 categories, one loses 4%")
    assert lost.passed < 0.75 < 0.8 < lost.part_found
    assert simulated("contexts", "longest bin loses 8%").failed > 0.95
    plain = simulated("looks", "3 looks, unplanned, +0.0%").passed
    assert plain > simulated("looks", "1 look, +0.0%").passed + 0.1
