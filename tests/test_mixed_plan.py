"""Plans of several formats: which linear has which, what is refused, what would load and cost."""

import dataclasses
from pathlib import Path

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import Format, Recipe
from draftquant.recipes.errors import LayoutError, PlanError
from draftquant.recipes.schema import LayoutName
from mixes import DOWN, FP8, FP8_STATIC, INT4, MIXES, MXFP4, NVFP4, PER_TOKEN, mixed
from tiny import tiny_eagle3_llama
from wide import WIDE

MIX = MIXES["nvfp4-fp8-down"]


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return read(tmp_path / "draft")


def read(folder: Path, **options: int) -> Draft:
    return read_draft(Checkpoint.open(tiny_eagle3_llama(folder, **WIDE["eagle3-llama"], **options)))


def refused(recipe: Recipe, draft: Draft, what: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(recipe, draft)
    assert caught.value.where == f"recipe {recipe.name}"
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_every_linear_has_the_format_of_its_rule(draft: Draft) -> None:
    plan = make_plan(MIXES["fp8-int4-qkv-nvfp4-down"], draft)
    found = {s.row.module.rpartition(".")[2]: plan.format_of(s) for s in plan.quantized}
    assert found == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), INT4),
        **dict.fromkeys(("o_proj", "gate_proj", "up_proj"), FP8),
        "down_proj": NVFP4,
    }
    down = next(s for s in plan.quantized if s.row.module.endswith("down_proj"))
    assert plan.recipe_of(down).formats == (NVFP4,)
    assert [t.name.rpartition(".")[2] for t in down.stored] == [
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    ]


@pytest.mark.parametrize("member", ["q_proj", "gate_proj"])
def test_two_formats_in_a_fused_linear(member: str, draft: Draft) -> None:
    recipe = mixed(NVFP4, (FP8, (f"*.{member}.weight",)))
    what = f".{member} weights fp8_e4m3 per channel, activations fp8_e4m3 per token, dynamic"
    refused(recipe, draft, "are fused by every engine, but would have several formats", "the same")
    refused(recipe, draft, what, "give all of them the same format")


@pytest.mark.parametrize(
    ("layout", "own", "other", "why"),
    [
        ("quark", FP8, FP8_STATIC, "declares one format for all linears"),
        ("modelopt", NVFP4, FP8_STATIC, "ModelOpt's layout declares several formats by"),
        ("awq", INT4, FP8, "declares one format for all linears"),
        ("fp8", FP8_STATIC, Format(weights=FP8_STATIC.weights, activations=PER_TOKEN),
         "declares one format for all linears"),
    ],
)  # fmt: skip
def test_a_layout_that_declares_one_format(
    layout: LayoutName, own: Format, other: Format, why: str, draft: Draft
) -> None:
    if layout == "awq":
        float16 = dataclasses.replace(own.weights, scale_dtype="float16")
        own = dataclasses.replace(own, weights=float16)
        other = dataclasses.replace(own, weights=dataclasses.replace(float16, group_size=64))
    recipe = dataclasses.replace(mixed(own, (other, DOWN)), layout=layout)
    with pytest.raises(LayoutError) as caught:
        make_plan(recipe, draft)
    assert caught.value.what.startswith(why)
    assert caught.value.what.endswith(f": the recipe has 2: {own}; {other}")
    assert caught.value.fix == "use one of: compressed-tensors"


def test_a_format_that_the_layout_cannot_hold(draft: Draft) -> None:
    mxfp4 = Format(weights=MXFP4.weights, activations=PER_TOKEN)
    with pytest.raises(LayoutError, match="no engine has a scheme for this pair") as caught:
        make_plan(mixed(NVFP4, (mxfp4, DOWN)), draft)
    assert str(mxfp4) in caught.value.what
    assert caught.value.fix == "use fewer formats: no layout can declare all of them"


def test_plain_data_has_the_format_of_every_linear(draft: Draft) -> None:
    tensors = {t["name"]: t["format"] for t in make_plan(MIX, draft).to_mapping()["tensors"]}
    assert tensors["fc.weight"] is None
    assert tensors["midlayer.mlp.down_proj.weight"] == {
        "weights": {"dtype": "fp8_e4m3", "granularity": "channel", "symmetric": True},
        "activations": {"dtype": "fp8_e4m3", "granularity": "token", "dynamic": True},
    }
