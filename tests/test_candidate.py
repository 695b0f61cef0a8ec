"""What a candidate's draftquant.json asks of the gate, and where static scales come from."""

import dataclasses
import json
from pathlib import Path

import pytest
from draftquant.calibration.static_scales import (
    calibrated_on,
    constant_scales,
    static_activations,
)
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.errors import BackendError
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.provenance import Provenance, read_provenance
from draftquant.quantize.plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.scripts.cli import main
from draftquant.validate.candidate import check_held_out
from draftquant.validate.errors import GateError
from test_provenance import document
from tiny import tiny_eagle3_llama
from tiny_mla import tiny_eagle3_mla

SEEN, UNSEEN = "a" * 64, "b" * 64


def provenance(kind: str, folder: Path, **changes: object) -> Provenance:
    (folder / "draftquant.json").write_text(json.dumps(document(kind) | changes))
    found = read_provenance(folder)
    assert found is not None
    return found


def test_the_traces_that_calibrated_a_draft_do_not_judge_it(tmp_path: Path) -> None:
    origin = f"traces sha256 {SEEN}, num_draft_tokens 3"
    calibrated = provenance("whole", tmp_path, input_scale_origin=origin)
    check_held_out(calibrated, UNSEEN)
    with pytest.raises(GateError, match="calibrated on these very traces"):
        check_held_out(calibrated, SEEN)
    for other in ("whole", "quantized", "repaired", "dequantized-of-ours"):
        check_held_out(provenance(other, tmp_path), SEEN)
    check_held_out(None, SEEN)


def test_an_origin_that_names_no_traces() -> None:
    assert not calibrated_on(None, SEEN)
    assert not calibrated_on("--input-scale", SEEN)
    assert calibrated_on(f"traces sha256 {SEEN}, num_draft_tokens 3", SEEN)


@pytest.mark.parametrize("make", [tiny_eagle3_llama, tiny_eagle3_mla])
def test_a_constant_scale_goes_to_every_quantized_linear(make: object, tmp_path: Path) -> None:
    assert callable(make)
    draft = read_draft(Checkpoint.open(make(tmp_path / "draft")))
    plan = make_plan(load_recipe("blackwell-fp8-mla"), draft)
    found = constant_scales(plan, 0.5)
    assert found.scales == dict.fromkeys((step.row.module for step in plan.quantized), 0.5)
    assert found.origin == "--input-scale"
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(BackendError, match=r"--input-scale: expected a positive number, got"):
            constant_scales(plan, wrong)


def test_only_static_recipes_are_calibrated() -> None:
    recipe = load_recipe("blackwell-fp8")
    assert static_activations(recipe) == recipe.activations
    for none in ("fp8-ptpc", "int4-channel"):
        with pytest.raises(BackendError, match="stores no static input scales"):
            static_activations(load_recipe(none))
    weights_only = dataclasses.replace(recipe, activations=None)
    with pytest.raises(BackendError, match="stores no static input scales"):
        static_activations(weights_only)


DAMAGED = {
    "verify": ["verify", "OUT", "--against", "DRAFT"],
    "inspect": ["inspect", "OUT"],
    "dequantize": ["dequantize", "OUT", "--out", "NEW"],
    "gate": ["gate", "DRAFT", "OUT", "--traces", "NEW"],
    "fix": ["check", "OUT", "--engine", "vllm", "--fix", "--out", "NEW"],
}


@pytest.mark.parametrize("command", DAMAGED)
def test_no_command_goes_on_with_a_damaged_record(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, out, new = tiny_eagle3_llama(tmp_path / "draft"), tmp_path / "out", tmp_path / "new"
    assert main(["quantize", str(draft), "--recipe", "fp8-ptpc", "--out", str(out)]) == 0
    (out / "draftquant.json").write_text('{"format": "draftquant-provenance"}')
    capsys.readouterr()
    names = {"OUT": str(out), "DRAFT": str(draft), "NEW": str(new)}
    code = main([names.get(word, word) for word in DAMAGED[command]])
    said = " ".join("".join(capsys.readouterr()).split())  # lines are wrapped
    assert code == (1 if command == "verify" else 2)
    assert "version: missing key" in said
    assert not new.exists()
