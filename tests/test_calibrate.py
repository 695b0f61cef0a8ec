"""`draftquant calibrate`: what static scales are worth, as figures, as a drawing, as a command."""

import json
from pathlib import Path

import pytest
import torch
from draftquant.calibration import plot_file
from draftquant.calibration.errors import CalibrationError
from draftquant.calibration.linear_inputs.chain_ranges import RangeKey, Ranges
from draftquant.calibration.linear_inputs.input_range import InputRange
from draftquant.calibration.linear_inputs.range_plot import draw_ranges
from draftquant.calibration.linear_inputs.static_error import static_errors
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.record_traces import record_traces
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.scripts.cli import main
from draftquant.validate.counting.activation_scales import ScaleComparison, compare_scales
from draftquant.validate.counting.trace_replay import replay_drafts
from tied_pair import prompt_tokens, save_draft, save_target

MODULE = "layers.0.mlp.down_proj"


def ranges_of(factor: float) -> Ranges:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    return {RangeKey(MODULE, step, "whole"): InputRange.of(x * factor * step) for step in (1, 2)}


@pytest.mark.parametrize(
    ("factor", "enough", "clipped"),
    [(1.0, True, False), (20.0, True, False), (100.0, False, True), (1e-3, False, False)],
)
def test_the_constant_serves_what_fp8_says_precisely(
    factor: float, enough: bool, clipped: bool
) -> None:
    """Normal values, twice as wide at the second step: the largest is about 8.6 times `factor`."""
    found = static_errors(ranges_of(factor))[MODULE]
    assert (found.one_is_enough, found.clipped) == (enough, clipped)
    assert found.absmax == pytest.approx(8.6 * factor, rel=0.2)
    assert found.absmax / 448 <= found.stored < found.absmax / 224
    assert found.stored_error == pytest.approx(found.best_error, rel=0.1)
    assert (found.faded > 0.5) == (factor == 1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    save_draft(folder / "draft", save_target(folder / "target"))
    prompts = [
        Prompt(id=f"p{i}", category="a", token_ids=ids) for i, ids in enumerate(prompt_tokens(3, 9))
    ]
    record_traces(folder / "target", prompts, folder / "traces", max_new_tokens=16)
    return folder


def test_scales_are_compared_by_replay(folder: Path) -> None:
    """Scales of 2^-20 clip everything to nothing; a factor of two changes no code."""
    draft, traces = load_draft(folder / "draft"), TraceFolder.open(folder / "traces")
    (plain,) = replay_drafts([draft], traces, num_draft_tokens=3)
    one = dict.fromkeys(draft.linears, 1.0)
    found = compare_scales(draft, traces, one, num_draft_tokens=3)
    assert found.unrounded == plain.counts.mean_acceptance_length
    assert found.measured == found.one == found.alignments[0]
    assert found.gain == 0
    assert found.gains_nothing
    tiny = compare_scales(draft, traces, dict.fromkeys(one, 2.0**-20), num_draft_tokens=3)
    assert tiny.measured < found.measured - 0.1
    assert tiny.alignments == found.alignments


def test_a_gain_is_more_than_the_spread_of_alignments() -> None:
    def compared(measured: float) -> ScaleComparison:
        alignments = (-0.002, 0.0, -0.004, -0.002)
        return ScaleComparison(
            unrounded=3.0, per_token=0.0, measured=measured, one=-0.002, alignments=alignments
        )

    assert compared(0.001).gains_nothing
    assert not compared(0.002).gains_nothing
    assert compared(0.001).spread == pytest.approx(0.00163, rel=0.01)


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_drawing_of_every_format(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"ranges.{suffix}"
    halves = {RangeKey("q", 1, "embedding"): ranges_of(1.0)[RangeKey(MODULE, 1, "whole")]}
    draw_ranges({**ranges_of(1.0), **halves}, path, "draft")
    start = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)
    if suffix == "svg":
        again = tmp_path / "again.svg"
        draw_ranges({**ranges_of(1.0), **halves}, again, "draft")
        assert again.read_bytes() == path.read_bytes()
        assert MODULE.encode() in path.read_bytes()


def test_what_cannot_be_drawn_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CalibrationError, match=r"ending in \.svg, \.png, \.pdf"):
        plot_file.check_plot_path(tmp_path / "ranges.txt")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(CalibrationError, match="is not installed") as caught:
        plot_file.check_plot_path(tmp_path / "ranges.svg")
    assert "pip install matplotlib" in str(caught.value)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = str(folder / "traces")
    command = ["calibrate", str(folder / "draft"), "--traces", traces, "-k", "2"]
    assert main([*command, "--compare", "--plot", str(tmp_path / "r.svg")]) == 0
    out = capsys.readouterr().out
    assert "layers.0.self_attn.q_proj" in out
    assert "embedding" in out
    assert "measured scales against the constant 1.0" in out
    assert (tmp_path / "r.svg").exists()
    assert main([*command, "--plot", str(tmp_path / "r.svg")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["step"] for one in found["ranges"]} == {1, 2}
    assert found["comparison"] is None
    once = found["ranges"][0]
    assert main([*command[:4], traces, *command[4:], "--json"]) == 0
    twice = json.loads(capsys.readouterr().out)["ranges"][0]
    assert (twice["count"], twice["absmax"]) == (2 * once["count"], once["absmax"])
