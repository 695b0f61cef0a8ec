"""What recipes promise, what plans foresee and what `check` says of the result are one thing."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
from asked_pairs import check_draft
from by_recipe import draft_of
from data_free import data_free
from draftquant.quantize.engines.contract import EngineName
from draftquant.quantize.engines.plan_verdicts import planned_verdicts
from draftquant.quantize.engines.versions import ENGINES
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import MeasuredInputs, make_plan
from draftquant.recipes import built_in_recipes, load_recipe
from draftquant.scripts.cli import main

PAIRS = Path(__file__).parent / "pairs"
FAMILIES = {"eagle3-llama": 4, "eagle3-mla": 5, "dflash": 4}
"""Family -> decoder layers of the shipped pair's target."""
EVERYDAY = {
    "mxfp4-weights": "eagle3-llama", "mi325x-w4a8": "eagle3-mla", "blackwell-nvfp4": "dflash",
    "int4-channel-gptq-head": "eagle3-llama",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(n, f, marks=() if EVERYDAY.get(n) == f else pytest.mark.slow)
        for n in built_in_recipes()
        for f in FAMILIES
    ],
)
def test_the_result_loads_where_the_recipe_says(name: str, family: str, tmp_path: Path) -> None:
    recipe, layers = load_recipe(name), FAMILIES[family]
    draft = draft_of(PAIRS / family / "draft")
    plan = make_plan(data_free(recipe), draft, target_layers=layers)
    own = {step.row.module: 0.25 for step in plan.quantized} if recipe.needs_input_scales else {}
    source = DraftSource(folder=draft.checkpoint.folder)
    quantize_draft(plan, tmp_path / "out", source=source, measured=MeasuredInputs(input_scales=own))
    planned = (dataclasses.replace(one, launch=None) for one in planned_verdicts(plan))
    foreseen = {(one.engine, one.arch): one for one in planned}
    places = [place for place in recipe.loads_on if family in place.family]
    promised = {(place.engine, arch) for place in places for arch in place.arch}
    loading = set()
    for engine in get_args(EngineName):
        for arch in ENGINES[engine].gpus:
            answer = check_draft(tmp_path / "out", engine=engine, arch=arch, target_layers=layers)
            one = foreseen.pop((engine, arch))
            assert answer.notes[: len(one.notes)] == one.notes  # then lints on what is computed
            assert dataclasses.replace(answer, launch=None, notes=one.notes) == one
            if answer.verdict == "LOADS":
                loading.add((engine, arch))
    assert foreseen == {}
    assert loading == promised


def test_recipes_are_listed_by_engine_gpu_and_family(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*asked: str) -> set[str]:
        assert main(["recipes", "list", "--json", *asked]) == 0
        return {recipe["name"] for recipe in json.loads(capsys.readouterr().out)}

    assert listed() == set(built_in_recipes())
    mla = listed("--engine", "sglang", "--gpu", "mi325x", "--family", "eagle3-mla")
    assert {"mi325x-w4a8-fp8", "mi325x-fp8", "fp8-ptpc"} <= mla
    assert not mla & {"mi325x-w4a8", "mi325x-int4-awq", "int4-channel", "blackwell-nvfp4"}
    assert "mi325x-fp8" in listed("--gpu", "h100")
    assert "mi325x-fp8" not in listed("--gpu", "a100")
    assert "int4-channel-gptq-head" not in listed("--family", "eagle3-mla")
    for gpu, emulated in (("mi325x", True), ("mi355x", False)):
        assert main(["recipes", "list", "--gpu", gpu]) == 0
        assert ("emulated on" in capsys.readouterr().out) == emulated
    assert main(["recipes", "list", "--family", "eagle"]) == 2
