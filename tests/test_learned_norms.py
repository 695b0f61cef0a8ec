"""Norms that learn with the codes: which ones, what is recorded, and what `verify` takes."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from by_recipe import draft_of
from draftquant.calibration.rounding.latents import LatentNorm
from draftquant.quantize.algorithms.nearest import AbsmaxNearest
from draftquant.quantize.drafts.family import MOST_OF_NORM
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.provenance import LearnedRounding, QuantizedProvenance
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight
from draftquant.quantize.planning.quantization_plan import MeasuredInputs, Plan, make_plan
from draftquant.quantize.verify import verify
from draftquant.recipes import Algorithm, Recipe, load_recipe
from safetensors.torch import load_file
from tiny import read_tensors, store, tiny_eagle3_llama, values_of
from tiny_mla import tiny_eagle3_mla
from verify_cases import assert_only_fault, edit, faults_of, flip_bit

NORM, OTHER = "midlayer.hidden_norm.weight", "midlayer.post_attention_layernorm.weight"
CONCAT = "midlayer.input_layernorm.weight"
LEARNED = Algorithm(scale="mse", rounding="learned", norms="learned")
RECIPE = dataclasses.replace(load_recipe("int4-channel"), backend="torch", algorithm=LEARNED)
ORIGIN = LearnedRounding(
    traces_sha256="0" * 64, num_draft_tokens=3, steps=1, sequences=1, seed=0, validation_prompts=1,
    kept_step=1, acceptance_length=2.0, overlap=0.9, acceptance_length_before=2.0,
    overlap_before=0.9, acceptance_length_unquantized=2.0,
)  # fmt: skip


class Found:
    """Nearest codes, and norms multiplied by factors, as if they had been learned."""

    origin = ORIGIN

    def __init__(self, plan: Plan, factors: Callable[[torch.Tensor], torch.Tensor]) -> None:
        folder = plan.draft.checkpoint.folder
        self._tensors = {
            name: t for f in folder.glob("*.safetensors") for name, t in load_file(f).items()
        }
        self._steps = {
            s.row.canonical.removesuffix(".weight"): s.row.tensor.name for s in plan.steps
        }
        self._weights, self._factors = plan.recipe.weights, factors

    def quantized(self, module: str) -> QuantizedWeight:
        weight = self._tensors[self._steps[module]]
        return AbsmaxNearest().quantize(weight, self._weights, absmax=None, moments=None)

    def weight(self, module: str) -> torch.Tensor:
        weight = self._tensors[self._steps[module]]
        return self._factors(weight.double()).to(weight.dtype)


def grown(weight: torch.Tensor) -> torch.Tensor:
    """By up to a tenth, and one element by a fifth."""
    factors = torch.linspace(0.9, 1.1, len(weight), dtype=torch.float64)
    factors[3] = 1.2
    return weight * factors


def plan_of(source: Path, recipe: Recipe = RECIPE) -> Plan:
    return make_plan(recipe, draft_of(source))


def record_of(folder: Path) -> QuantizedProvenance:
    record = read_provenance(folder)
    assert isinstance(record, QuantizedProvenance)
    return record


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("norms") / "source")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, plan = tmp_path_factory.mktemp("made") / "out", plan_of(source)
    measured = MeasuredInputs(found=Found(plan, grown))
    quantize_draft(plan, out, source=DraftSource(folder=source), measured=measured)
    return out


def learning(source: Path, recipe: Recipe = RECIPE) -> set[str]:
    return {step.row.canonical for step in plan_of(source, recipe).learned_norms}


def test_norms_in_front_of_quantized_linears_learn(source: Path, tmp_path: Path) -> None:
    layer = {f"layers.0.{n}.weight" for n in ("input_layernorm", "hidden_norm")}
    mlp = "layers.0.post_attention_layernorm.weight"
    assert learning(source) == {*layer, mlp}
    # kv_b_proj is kept: so is the norm before it.
    mla = tiny_eagle3_mla(tmp_path / "mla")
    assert learning(mla) == {*layer, mlp, "layers.0.self_attn.q_a_layernorm.weight"}
    keep = dataclasses.replace(
        RECIPE.rules[0], role=(), tensor=("*.gate_proj.weight", "*.up_proj.weight"), action="keep",
        why="for the test",
    )  # fmt: skip
    fewer = dataclasses.replace(RECIPE.expect, quantized_per_layer=5)
    kept = dataclasses.replace(RECIPE, rules=(*RECIPE.rules, keep), expect=fewer)
    assert learning(source, kept) == layer
    algorithm = dataclasses.replace(LEARNED, norms="kept")
    assert learning(source, dataclasses.replace(RECIPE, algorithm=algorithm)) == set()


def test_what_learned_is_stored_recorded_and_verified(source: Path, made: Path) -> None:
    record = record_of(made)
    before, after = read_tensors(source), read_tensors(made)
    assert record.learned_norms.keys() == {NORM, OTHER, CONCAT}
    for name, factor in record.learned_norms.items():
        a, b = values_of(before[name]).astype(float), values_of(after[name]).astype(float)
        ratios = np.abs(a / b)
        assert factor == max(ratios.max(), (1 / ratios).max()) == pytest.approx(1.2, abs=0.01)
    assert after["norm.weight"] == before["norm.weight"]
    report = verify(made, source)
    assert report.ok, report.faults
    assert report.learned_norms == record.learned_norms
    assert report.kept == len(before) - 7 - 3
    assert "learned | 3 tensors: norm 3" in (made / "README.md").read_text(encoding="utf-8")


def test_another_norm_than_was_learned(made: Path, source: Path, tmp_path: Path) -> None:
    """One bit, within the recorded factor too: the digest under the seal says what it is."""
    for bit, where in ((0, "tensor_digests"), (15, f"{NORM}: expected the source's")):
        copy = Path(shutil.copytree(made, tmp_path / str(bit)))
        edit(copy, lambda t, bit=bit: t.update({NORM: flip_bit(t[NORM], bit)}))
        assert where in faults_of(verify(copy, source))
    words = "expected the source's values times or divided by at most 1.19"
    for factor in (1.25, 0.8):
        copy = Path(shutil.copytree(made, tmp_path / f"{factor}"))
        (copy / "draftquant.json").unlink()
        before = values_of(read_tensors(source)[NORM])
        other = store(before * np.float32(factor), "BF16")
        edit(copy, lambda t, other=other: t.update({NORM: other}))
        report = verify(copy, source, method=record_of(made).method)
        assert_only_fault(report, NORM, words)
        assert f"first {values_of(other)[0]:g} for {before[0]:g} at 0" in faults_of(report)


def test_another_factor_on_record(made: Path, source: Path) -> None:
    record = record_of(made)
    factors = dict(record.learned_norms)
    for factor, words in (
        (1.9, "expected a largest change by a factor of 1.9"),
        (2.5, f"expected factors from 1 to {MOST_OF_NORM:g}"),
        (float("nan"), "expected factors from 1 to"),
    ):
        method = dataclasses.replace(record.method, learned_norms={**factors, NORM: factor})
        assert words in faults_of(verify(made, source, method=method)), factor
    for norms in ({**factors, "norm.weight": 1.0}, {NORM: factors[NORM]}):
        method = dataclasses.replace(record.method, learned_norms=norms)
        found = faults_of(verify(made, source, method=method))
        said = f"draftquant.json: learned_norms: expected {', '.join(sorted(factors))}, got"
        assert said in found
        assert f"{NORM}: expected the source's bytes" in found
    kept = dataclasses.replace(record.recipe, algorithm=dataclasses.replace(LEARNED, norms="kept"))
    found = faults_of(verify(made, source, method=dataclasses.replace(record.method, recipe=kept)))
    assert "learned_norms: expected none: the recipe keeps them" in found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_latent_norm_stays_within_reach(dtype: torch.dtype) -> None:
    """Rounded to its dtype, no element leaves what `verify` takes, and zeros stay zeros."""
    start = torch.tensor([0.7, -1.3, 0.0, 1e-7, 3.1415, -0.001]).to(dtype)
    norm = LatentNorm(start, device=torch.device("cpu"))
    assert torch.equal(norm.parts()["weights"], start)
    for push in (1e3, -1e3):
        with torch.no_grad():
            norm.codes.fill_(push)
        norm.keep_within_reach()
        found = norm.parts()["weights"]
        assert torch.equal(found.float(), norm.dequantized().detach())
        before, after = start.double(), found.double()
        moved = before != 0
        ratio = after[moved] / before[moved]
        farthest = max(float(ratio.max()), 1 / float(ratio.min()))
        assert 0.9 * MOST_OF_NORM < farthest <= MOST_OF_NORM
        assert float(after[2]) == 0
