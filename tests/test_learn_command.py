"""`draftquant quantize --algorithm learned --traces T`, and learned codes of a shipped pair."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from draftquant.calibration import quantizing
from draftquant.calibration.linear_inputs.plan_inputs import served_rounding
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.rounding.learn import Learning, first_latents
from draftquant.calibration.rounding.learned_state import KeptRounding, LearningSettings
from draftquant.calibration.rounding.sequences import split_prompts
from draftquant.quantize.verify import verify
from draftquant.scripts.cli import main
from recorded import record_traces
from rounding_pairs import RoundingPair, learned_recipe, shared_pair
from test_learn import total_divergence

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FEW = LearningSettings(steps=4, sequences=2, validate_every=2)
PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "LearningSettings", lambda: FEW)


@pytest.fixture(scope="module")
def pair() -> RoundingPair:
    return shared_pair("llama")


def quantize(pair: RoundingPair, out: Path, *arguments: str) -> int:
    given = [x for a in arguments for x in
             (("--traces", str(pair.folder / "traces")) if a == "TRACES" else (a,))]  # fmt: skip
    return main(["quantize", str(pair.draft_folder), "--out", str(out), *given])


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["int4-channel", "mi325x-w4a8-fp8", "blackwell-nvfp4"])
def test_a_draft_is_quantized_verified_and_told_of(
    recipe: str, pair: RoundingPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--recipe", recipe, "--algorithm", "learned", "TRACES")
    assert quantize(pair, tmp_path / "a", *arguments) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "step 2 of 4, loss 0.0" in said
    assert "on 2 prompts held back" in said
    assert "learned rounding from 12 prompts, of which about 20% are held back" in said
    assert ("input scales from 12 traces" in said) is (recipe == "blackwell-nvfp4")
    assert quantize(pair, tmp_path / "b", *arguments) == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    report = verify(tmp_path / "a", pair.draft_folder)
    assert report.ok, report.faults
    record = json.loads((tmp_path / "a" / "draftquant.json").read_text(encoding="utf-8"))
    assert record["recipe"]["algorithm"]["rounding"] == "learned"
    assert record["recipe"]["algorithm"]["scale"] == "mse"
    assert record["recipe"]["backend"] == "torch"
    assert len(record["calibration_prompts"]) == 12  # those that were held back too
    assert record["learned"]["steps"] == 4


# ---- a trained draft


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> RoundingPair:
    """The shipped Llama pair with short traces of 16 of its calibration prompts."""
    folder = tmp_path_factory.mktemp("shipped")
    prompts = read_prompts(PAIR / "calibration.jsonl")[:16]
    record_traces(
        PAIR / "target", prompts, folder / "traces", max_new_tokens=40, aux_layer_ids=(0, 1, 2)
    )
    for name in ("draft", "target"):
        (folder / name).symlink_to(PAIR / name)
    return RoundingPair(folder, "llama")


def bf16_products(_learning: Learning) -> torch.autocast:
    """As on a GPU: what is not finite, or of a dtype that does not fit, shows on a CPU too."""
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "narrow"),
    [
        ("int4-channel", False),
        ("int4-channel", True),
        ("blackwell-nvfp4", False),
        ("mi355-mxfp4", False),
    ],
)
def test_learned_codes_of_a_trained_draft_diverge_less_than_nearest_ones(
    name: str, narrow: bool, shipped: RoundingPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than under absmax scales, and on the prompts that were held back as well."""
    if narrow:
        monkeypatch.setattr(Learning, "_precision", bf16_products)
    losses = {}
    overlaps = {}
    for scale, steps in (("absmax", 0), ("mse", 12)):
        plan = shipped.plan(learned_recipe(name, scale=scale))
        learning = Learning(
            DraftRun(shipped.loaded(), shipped.traces, 3),
            first_latents(plan, shipped.loaded()),
            served_rounding(plan, shipped.static(plan), torch.device("cpu")),
            split_prompts(shipped.traces, 3, share=0.25, seed=0),
            settings=dataclasses.replace(FEW, steps=max(1, steps), validate_every=12),
            kept=KeptRounding(tmp_path),
        )
        looks = learning.run((), save_seconds=1e9, on_progress=lambda _: None) if steps else ()
        losses[scale] = total_divergence(shipped, learning)
        overlaps[scale] = looks[-1].overlap if looks else learning.validated(0).overlap
    assert losses["mse"] < 0.8 * losses["absmax"]
    assert overlaps["mse"] > overlaps["absmax"]
