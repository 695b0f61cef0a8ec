"""DFlash2 through the commands: codes by GPTQ and by learning, verified and replayed."""

import json
from pathlib import Path
from typing import Any

import pytest
from block_pair import with_own_tensors
from draftquant.calibration.rounding import learned_state as settings_module
from draftquant.quantize.verify import verify
from draftquant.scripts.cli import main
from rounding_pairs import make_pair
from test_learn_command import FEW

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, traces of it and a DFlash draft."""
    return make_pair(tmp_path_factory.mktemp("dflash2") / "pair", "dflash").folder


@pytest.fixture(scope="module")
def folder(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same draft with the tensors of DFlash2."""
    return with_own_tensors(plain / "draft", tmp_path_factory.mktemp("own") / "draft", "dflash2")


def run(command: str, *arguments: object) -> None:
    assert main([command, *map(str, arguments)]) == 0


@pytest.mark.some(3)
@pytest.mark.parametrize("algorithm", ["absmax", "gptq", "learned"])
def test_codes_are_found_verified_and_replayed(
    algorithm: str,
    folder: Path,
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(settings_module, "LearningSettings", lambda: FEW)
    traces = ("--traces", plain / "traces", "--target", plain / "target")
    out, floats = tmp_path / "int4", tmp_path / "bf16"
    recipe = ("--recipe", "int4-channel", "--algorithm", algorithm)
    inputs = () if algorithm == "absmax" else traces
    run("quantize", folder, *recipe, "--out", out, *inputs)
    assert verify(out, folder).ok
    run("dequantize", out, "--out", floats)
    capsys.readouterr()
    run("replay", folder, out, floats, *traces, "--json")
    said: Any = json.loads(capsys.readouterr().out)
    lengths = [draft["mean_acceptance_length"] for draft in said]
    assert lengths[0] > 1.1
    assert abs(lengths[1] - lengths[2]) < 0.1  # BF16 rounds the dequantized weights once more
