"""Several formats along traces: scales, moments and learned codes of each linear by its own."""

import dataclasses
from pathlib import Path

import pytest
import torch
from draftquant.calibration.linear_inputs.plan_inputs import measured_inputs, served_rounding
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.rounding.learn import first_latents, learned_codes, nearest_weights
from draftquant.calibration.rounding.learned_state import LearnedCodes, LearningSettings
from draftquant.quantize.files.hub import resolve_draft
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import NOTHING_MEASURED, Measured
from draftquant.quantize.verify import verify
from draftquant.recipes import Algorithm, Recipe
from mixes import DOWN, FP8, FP8_STATIC, INT4_CHANNEL, NVFP4, mixed
from rounding_pairs import K, RoundingPair, shared_pair

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

GPTQ = Algorithm(scale="mse", rounding="gptq")
LEARNED = Algorithm(scale="mse", rounding="learned")
FEW = LearningSettings(steps=6, sequences=2, validate_every=3, warmup_steps=2)
STATIC_DOWN = mixed(NVFP4, (FP8_STATIC, DOWN))
DYNAMIC_DOWN = mixed(INT4_CHANNEL, (FP8, DOWN))


@pytest.fixture(scope="module", params=K)
def pair(request: pytest.FixtureRequest) -> RoundingPair:
    return shared_pair(request.param)


def by(recipe: Recipe, algorithm: Algorithm) -> Recipe:
    return dataclasses.replace(recipe, algorithm=algorithm)


def test_static_scales_are_those_of_the_format_of_each_linear(pair: RoundingPair) -> None:
    plan = pair.plan(STATIC_DOWN)
    static = pair.static(plan)
    nvfp4 = pair.static(pair.plan(mixed(NVFP4, (FP8, ("*.o_proj.weight",)))))
    fp8 = pair.static(pair.plan(mixed(FP8_STATIC, (FP8, ("*.o_proj.weight",)))))
    for module, scale in static.input_scales.items():
        if not module.endswith("o_proj"):
            own = fp8 if module.endswith("down_proj") else nvfp4
            assert scale == own.input_scales[module], module
    assert {m for m in static.input_scales if m not in nvfp4.input_scales} == {
        s.row.module for s in plan.quantized if s.row.module.endswith("o_proj")
    }


def test_inputs_are_rounded_by_the_format_of_each_linear(pair: RoundingPair) -> None:
    plan = pair.plan(DYNAMIC_DOWN)
    rounding = served_rounding(plan, NOTHING_MEASURED, torch.device("cpu"))
    x = torch.linspace(-1, 1, 64).reshape(1, 64)
    for step in plan.quantized:
        name = step.row.canonical.removesuffix(".weight")
        assert torch.equal(rounding(name, x), x) != name.endswith("down_proj"), name


@pytest.mark.some(2)
@pytest.mark.parametrize("recipe", [STATIC_DOWN, DYNAMIC_DOWN], ids=["nvfp4", "int4"])
def test_gptq_rounds_four_bits_and_leaves_fp8_to_the_nearest(
    recipe: Recipe, pair: RoundingPair, tmp_path: Path
) -> None:
    plan = pair.plan(by(recipe, GPTQ))
    (tmp_path / "spool").mkdir()
    found = measured_inputs(
        plan, DraftRun(pair.loaded(), pair.traces, pair.num_draft_tokens), spool=tmp_path / "spool"
    )
    assert found.statistics is not None
    for name, chosen in (("gptq", plan), ("nearest", pair.plan(recipe))):
        quantize_draft(
            chosen,
            tmp_path / name,
            source=resolve_draft(str(pair.draft_folder)),
            measured=found if name == "gptq" else dataclasses.replace(found, statistics=None),
        )
        report = verify(tmp_path / name, pair.draft_folder)
        assert report.ok, report.faults
    rules = verify(tmp_path / "gptq", pair.draft_folder).rule.split("; ")
    assert sorted(rules) == [
        "exact absmax scales, exactly the nearest quantized values",
        "scales of a search around absmax, quantized values with at most 4 times the error"
        " of the nearest",
    ]
    gptq, nearest = (pair.loaded(tmp_path / name).weights for name in ("gptq", "nearest"))
    for step in plan.quantized:
        same = torch.equal(gptq[step.row.canonical], nearest[step.row.canonical])
        assert same == step.row.module.endswith("down_proj"), step.row.module
    measured = {path.stem for path in (tmp_path / "spool").iterdir()}
    assert not any(name.endswith("down_proj") for name in measured)


def test_learning_moves_four_bits_beside_nearest_fp8(pair: RoundingPair, tmp_path: Path) -> None:
    plan, out = pair.plan(by(DYNAMIC_DOWN, LEARNED)), tmp_path / "out"
    draft = pair.loaded()
    latents, others = first_latents(plan, draft), nearest_weights(plan, draft)
    assert {name.removesuffix(".weight") for name in others} | latents.keys() == {
        step.row.canonical.removesuffix(".weight") for step in plan.quantized
    }
    assert {name.rpartition(".")[2] for name in map(_module, others)} == {"down_proj"}

    def use(found: LearnedCodes) -> None:
        quantize_draft(
            plan, out, source=resolve_draft(str(pair.draft_folder)), measured=Measured(found=found)
        )
        for name in latents:
            served = pair.loaded(out).weights[f"{name}.weight"]
            assert torch.equal(found.quantized(name).dequantized(), served), name

    with learned_codes(
        plan,
        DraftRun(draft, pair.traces, pair.num_draft_tokens),
        out,
        settings=FEW,
        save_seconds=0.0,
    ) as found:
        use(found)
    report = verify(out, pair.draft_folder)
    assert report.ok, report.faults
    stored = pair.loaded(out).weights
    assert all(torch.equal(stored[name], weight) for name, weight in others.items())


def _module(name: str) -> str:
    return name.removesuffix(".weight")
