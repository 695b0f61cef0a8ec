"""Plans of several formats: which linear has which, what is refused, what would load and cost."""

import dataclasses
from pathlib import Path

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.engines.plan_verdicts import planned_verdicts
from draftquant.quantize.estimate.draft_step import planned_weights
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.making.preparing import check_backends
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import Algorithm, Format, Recipe, Rule, to_mapping
from draftquant.recipes.errors import BackendError, LayoutError, PlanError
from draftquant.recipes.schema import LayoutName
from draftquant.scripts.cli import main
from mixes import DOWN, FP8, FP8_STATIC, INT4, MIXES, MXFP4, NVFP4, PER_TOKEN, mixed
from test_recipes import write
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


def test_bytes_by_hand(draft: Draft) -> None:
    """Of down_proj [128, 256] in FP8 per channel: a byte per weight, a float32 scale per row."""
    step = next(s for s in make_plan(MIX, draft).quantized if "down" in s.row.module)
    assert step.bytes_after == 128 * 256 + 4 * 128


@pytest.mark.parametrize("member", ["q_proj", "gate_proj"])
def test_two_formats_in_a_fused_linear(member: str, draft: Draft) -> None:
    recipe = mixed(NVFP4, (FP8, (f"*.{member}.weight",)))
    what = f".{member} weights fp8_e4m3 per channel, activations fp8_e4m3 per token, dynamic"
    refused(recipe, draft, "are fused by every engine, but would have several formats", "the same")
    refused(recipe, draft, what, "give all of them the same format")


def test_a_format_for_one_layer_only(tmp_path: Path) -> None:
    """Engines number the layers of a draft in their own way: a target cannot say which."""
    draft = read(tmp_path / "draft", num_layers=2)
    recipe = mixed(NVFP4, (FP8, ("layers.1.mlp.down_proj.weight",)))
    fix = "give 'down_proj' the same format in every layer"
    refused(recipe, draft, "so a format of 'down_proj' holds for all of them", fix)
    assert len(make_plan(MIX, draft).quantized) == 14


def test_a_format_for_nothing(draft: Draft) -> None:
    recipe = mixed(NVFP4, (FP8, ("*.dwon_proj.weight",)))
    refused(recipe, draft, "claims no tensor", "correct the rule")
    rules = (*recipe.rules[:-1], dataclasses.replace(recipe.rules[-1], optional=True))
    declared = make_plan(dataclasses.replace(recipe, rules=rules), draft).declared()
    assert list(declared["config_groups"]) == ["group_0"]
    assert declared["format"] == "nvfp4-pack-quantized"


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


def test_an_algorithm_must_know_the_recipes_own_format() -> None:
    algorithm = Algorithm(scale="mse", rounding="gptq")
    check_backends(dataclasses.replace(MIX, algorithm=algorithm))
    with pytest.raises(BackendError, match="rounding to fp8_e4m3 loses too little"):
        check_backends(dataclasses.replace(mixed(FP8, (NVFP4, DOWN)), algorithm=algorithm))


def test_a_toolkit_must_know_every_format() -> None:
    with pytest.raises(BackendError, match=r"backend modelopt: expected fp8_e4m3.*, got int4 per"):
        check_backends(dataclasses.replace(mixed(FP8, (INT4, DOWN)), backend="modelopt"))


def test_what_would_load_is_asked_of_every_engine(draft: Draft) -> None:
    verdicts = {f"{x.engine} {x.arch}": x.verdict for x in planned_verdicts(make_plan(MIX, draft))}
    for place in ("vllm sm90", "vllm sm100", "sglang sm90", "sglang sm100"):
        assert verdicts[place] == "LOADS", place
    assert verdicts["sglang gfx942"] == "REFUSED"


def test_an_estimate_multiplies_each_linear_in_its_own_format(draft: Draft) -> None:
    found = {w.row.module: w.precision for w in planned_weights(make_plan(MIX, draft))}
    assert found["midlayer.mlp.down_proj"] == "fp8"
    assert found["midlayer.mlp.up_proj"] == "nvfp4"
    assert found["fc"] == "bf16"


def test_the_command_shows_the_format_of_every_linear(
    draft: Draft,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    path = write(tmp_path / f"{MIX.name}.yaml", to_mapping(MIX))
    assert main(["plan", str(draft.checkpoint.folder), "--recipe", str(path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    (down,) = (line for line in lines if "down_proj.weight" in line)
    assert "weights fp8_e4m3 per channel, activations" in down  # cells go on below
    (up,) = (line for line in lines if "up_proj.weight" in line)
    assert "weights nvfp4 per group of 16, activations" in up


def test_plain_data_has_the_format_of_every_linear(draft: Draft) -> None:
    tensors = {t["name"]: t["format"] for t in make_plan(MIX, draft).to_mapping()["tensors"]}
    assert tensors["fc.weight"] is None
    assert tensors["midlayer.mlp.down_proj.weight"] == {
        "weights": {"dtype": "fp8_e4m3", "granularity": "channel", "symmetric": True},
        "activations": {"dtype": "fp8_e4m3", "granularity": "token", "dynamic": True},
    }


def test_kept_linears_beside_several_formats(draft: Draft) -> None:
    keep = Rule(tensor=("*.o_proj.weight",), action="keep", why="the one that loses most")
    expect = dataclasses.replace(MIX.expect, quantized_per_layer=6)
    plan = make_plan(dataclasses.replace(MIX, rules=(*MIX.rules, keep), expect=expect), draft)
    declared = plan.declared()
    assert "re:.*o_proj$" in declared["ignore"]
    assert declared["config_groups"]["group_1"]["targets"] == ["re:.*down_proj$"]
