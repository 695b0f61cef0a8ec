"""Plans of several formats: which linear has which, what is refused, what would load and cost."""

import dataclasses
from pathlib import Path

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import Format
from draftquant.recipes.errors import LayoutError, PlanError
from draftquant.recipes.schema import LayoutName
from mixes import DOWN, FP8, FP8_STATIC, INT4, MIXES, MXFP4, NVFP4, PER_TOKEN, mixed
from tiny import tiny_eagle3_llama
from wide import WIDE


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    folder = tiny_eagle3_llama(tmp_path / "draft", **WIDE["eagle3-llama"])
    return read_draft(Checkpoint.open(folder))


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
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale",
    ]  # fmt: skip
    tensors = {t["name"]: t["format"] for t in plan.to_mapping()["tensors"]}
    assert tensors["fc.weight"] is None
    assert tensors["midlayer.mlp.down_proj.weight"]["weights"]["dtype"] == "nvfp4"
    again = mixed(FP8, (NVFP4, DOWN), (NVFP4, ("*.o_proj.weight",)))
    assert len(make_plan(again, draft).declared()["config_groups"]) == 2


def test_two_formats_in_a_fused_linear(draft: Draft) -> None:
    recipe = mixed(NVFP4, (FP8, ("*.gate_proj.weight",)))
    with pytest.raises(PlanError, match="are fused by every engine, but would have") as caught:
        make_plan(recipe, draft)
    own = ".gate_proj weights fp8_e4m3 per channel, activations fp8_e4m3 per token, dynamic"
    assert own in caught.value.what
    assert "give all of them the same format" in caught.value.fix


MXFP4_FP8 = Format(weights=MXFP4.weights, activations=PER_TOKEN)


@pytest.mark.parametrize(
    ("layout", "own", "other", "why", "fix"),
    [
        ("quark", FP8, FP8_STATIC, "declares one format for all linears: the recipe has 2",
         "use one of: compressed-tensors"),
        ("modelopt", NVFP4, FP8_STATIC, "ModelOpt's layout declares several formats by",
         "use one of: compressed-tensors"),
        ("compressed-tensors", NVFP4, MXFP4_FP8, "no engine has a scheme for this pair",
         "use fewer formats: no layout can declare all of them"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_declare_them(
    layout: LayoutName, own: Format, other: Format, why: str, fix: str, draft: Draft
) -> None:
    recipe = dataclasses.replace(mixed(own, (other, DOWN)), layout=layout)
    with pytest.raises(LayoutError, match=why) as caught:
        make_plan(recipe, draft)
    assert str(other) in caught.value.what
    assert caught.value.fix == fix
