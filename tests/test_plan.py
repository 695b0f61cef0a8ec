"""The plan: claims, refusals, counts and bytes on tiny drafts, worked by hand."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from by_recipe import WIDE, draft_of
from draftquant.quantize.drafts import Draft
from draftquant.quantize.engines.plan_verdicts import nothing_loads, planned_verdicts
from draftquant.quantize.planning.quantization_plan import Plan, make_plan
from draftquant.recipes import Expectation, Format, Recipe, Rule, built_in_recipes, load_recipe
from draftquant.recipes.errors import LayoutError, PlanError
from draftquant.recipes.schema import LayoutName
from draftquant.scripts.cli import main
from mixes import DOWN, FP8, FP8_STATIC, INT4, MIXES, MXFP4, NVFP4, PER_TOKEN, mixed
from tiny import tiny_eagle3_llama

PTPC = load_recipe("fp8-ptpc")
OTHERS = Rule(
    role=("fusion", "embedding", "head", "norm", "vocabulary_map"), action="keep", why="small"
)
QUANTIZE = Rule(role=("attention", "mlp"), action="quantize")


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return read(tmp_path / "draft")


def read(folder: Path, **options: Any) -> Draft:
    return draft_of(tiny_eagle3_llama(folder, **options))


def recipe(*rules: Rule, count: int = 7, of: Recipe = PTPC) -> Recipe:
    return dataclasses.replace(of, rules=rules, expect=Expectation(quantized_per_layer=count))


def keep(*patterns: str) -> Rule:
    return Rule(tensor=patterns, action="keep", why="an exception")


def refused(chosen: Recipe, draft: Draft, what: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(chosen, draft)
    assert caught.value.where == f"recipe {chosen.name}"
    assert what in caught.value.what
    assert fix in caught.value.fix


def actions(plan: Plan) -> dict[str, tuple[str, int]]:
    return {step.row.tensor.name: (step.action, step.rule) for step in plan.steps}


# Claims


MISPELT = keep("midlayer.self_attn.o_porj.weight")
KV_UP = Rule(role=("kv_up",), action="keep", why="engines absorb it")
WITHOUT_HEAD = dataclasses.replace(OTHERS, role=("fusion", "embedding", "norm"))
NORM = Rule(tensor=("norm.weight",), action="quantize")

REFUSED: list[tuple[tuple[Rule, ...], int, str, str]] = [
    ((QUANTIZE, OTHERS, MISPELT), 7,
     "rules[2] (keep tensor: ['midlayer.self_attn.o_porj.weight']) claims no tensor of",
     "correct the rule"),
    ((QUANTIZE, OTHERS, MISPELT), 7, "nearest: midlayer.self_attn.o_proj.w", "'optional: true'"),
    ((QUANTIZE, OTHERS, KV_UP), 7,
     "roles here: ['attention', 'embedding', 'fusion', 'head', 'mlp', 'norm']",
     "use the recipe for this family"),
    ((QUANTIZE, WITHOUT_HEAD), 7, "no rule claims lm_head.weight (role head)",
     "add a rule for role 'head'"),
    ((QUANTIZE, OTHERS, keep("*.o_proj.weight"), keep("midlayer.*.o_proj.*")), 7,
     "midlayer.self_attn.o_proj.weight is claimed by rules[2] and rules[3]",
     "narrow one of the two patterns"),
    ((QUANTIZE, OTHERS, NORM), 7, "norm.weight (role norm, shape",
     "quantize roles attention, mlp, fusion, head, correction, indexer only"),
    ((QUANTIZE, OTHERS), 6,
     "expect: 6 quantized linears in each of 1 layer(s) make 6, but the rules quantize 7",
     "correct the rules or 'expect'"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "count", "what", "fix"), REFUSED)
def test_rules_that_do_not_fit_are_refused(
    rules: tuple[Rule, ...], count: int, what: str, fix: str, draft: Draft
) -> None:
    refused(recipe(*rules, count=count), draft, what, fix)


def test_part_of_a_fused_linear(draft: Draft) -> None:
    for kept in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        chosen = recipe(QUANTIZE, OTHERS, keep(f"*.{kept}.weight"), count=6)
        refused(chosen, draft, "but the rules quantize only midlayer.", "all of them or none")


def test_patterns_match_canonical_names_too(draft: Draft) -> None:
    whole = recipe(QUANTIZE, OTHERS, keep("layers.0.self_attn.[qkv]_proj.weight"), count=4)
    assert len(make_plan(whole, draft).quantized) == 4


def test_linear_kept_in_one_layer_only(tmp_path: Path) -> None:
    """An exclude cannot say which layer: engines number them in their own way."""
    draft = read(tmp_path / "draft", num_layers=2)
    rules = (QUANTIZE, OTHERS, keep("layers.0.self_attn.[qkvo]_proj.weight"))
    chosen = recipe(*rules, count=5)
    refused(chosen, draft, "layers.1.self_attn", "in every layer or in none")


@pytest.mark.parametrize(
    ("intermediate", "fix"),
    [
        (320, "groups of 64 or 32 fit every linear: write these lines into mine.yaml, and give"),
        (72, "no groups of int4 fit: take a recipe with a scale per channel, such as int4-channel"),
    ],
)
def test_the_sizes_of_groups_that_fit_all_linears_are_named(
    intermediate: int, fix: str, tmp_path: Path
) -> None:
    draft = read(tmp_path / "draft", hidden=192, intermediate=intermediate, head_dim=64)
    with pytest.raises(LayoutError) as caught:
        make_plan(load_recipe("int4-group128"), draft)
    assert caught.value.where == "midlayer.mlp.down_proj.weight"
    assert caught.value.what.endswith(f"needs a multiple of 128 inputs, got {intermediate}")
    assert fix in caught.value.fix


# Bytes. The wide draft: q 128x256, k and v 64x256, o 128x128, gate and up 256x128, down 128x256.
CODES = 128 * 256 + 2 * 64 * 256 + 128 * 128 + 3 * 128 * 256
ROWS = 128 + 64 + 64 + 128 + 256 + 256 + 128
KEPT = 2 * (2 * 96 * 128 + 128 * 384 + 4 * 128)  # embedding and head, fc, four norms, in BF16
MLP_AND_FC = 3 * 128 * 256 + 128 * 384
OVERHEAD = {
    "mi325x-w4a8": {"weight_scale": 2 * ROWS, "weight_zero_point": ROWS // 2},
    "mi325x-w4a8-fp8": {"weight_scale": 4 * ROWS},
    "mi325x-fp8": {"weight_scale": 4 * ROWS},
    "mi325x-int4-awq": {"scales": 2 * CODES // 128, "qzeros": CODES // 128 // 2},
    "mi355-mxfp4": {"weight_scale": CODES // 32},
    "mi355-w4a8": {"weight_scale": CODES // 32, "input_scale": 7 * 4},
    "int4-channel": {"weight_scale": 2 * ROWS, "weight_shape": 7 * 16},
    "int8-channel": {"weight_scale": 2 * ROWS, "weight_shape": 7 * 16},
    "int8-channel-head": {"weight_scale": 2 * (ROWS + 96), "weight_shape": 8 * 16},
    "int4-group128": {"weight_scale": 2 * CODES // 128, "weight_shape": 7 * 16},
    "fp8-ptpc": {"weight_scale": 4 * ROWS},
    "blackwell-fp8": {"weight_scale": 7 * 4, "input_scale": 7 * 4},
    "blackwell-fp8-mla": {"weight_scale": 4 * ROWS},
    "blackwell-nvfp4": {"weight_scale": CODES // 16, "weight_scale_2": 7 * 4, "input_scale": 7 * 4},
    "blackwell-nvfp4-weights": {"weight_scale": MLP_AND_FC // 16, "weight_scale_2": 4 * 4},
    "nvfp4-weights": {"weight_scale": CODES // 16, "weight_global_scale": 7 * 4},
    "mxfp4-weights": {"weight_scale": CODES // 32},
    "fp8-ptpc-head": {"weight_scale": 4 * (ROWS + 96)},
    "int4-channel-gptq-head": {"weight_scale": 2 * (ROWS + 96), "weight_shape": 8 * 16},
    "int4-group128-gptq-head": {"weight_scale": 2 * CODES // 128 + 4 * 96, "weight_shape": 7 * 16},
}
HEAD_BYTES = {
    "fp8-ptpc-head": 1, "int8-channel-head": 1, "int4-channel-gptq-head": 0.5,
    "int4-group128-gptq-head": 1,
}  # fmt: skip
"""Of each of 96 x 128 weights, which have two where the head is kept."""


def test_bytes_by_hand(tmp_path: Path) -> None:
    draft = read(tmp_path / "draft", **WIDE["eagle3-llama"])
    for name in built_in_recipes():
        plan = make_plan(load_recipe(name), draft)
        assert plan.bytes_before == KEPT + 2 * CODES == draft.checkpoint.nbytes
        codes = MLP_AND_FC if name == "blackwell-nvfp4-weights" else CODES
        saved = codes if plan.recipe.weights.stored.number.bits == 8 else codes * 3 // 2
        # Other codes in files of the same form.
        overhead = OVERHEAD[name.removesuffix("-gptq").removesuffix("-learned")]
        assert plan.overhead() == overhead
        head = int((HEAD_BYTES.get(name, 2) - 2) * 96 * 128)
        assert plan.bytes_after == KEPT + 2 * CODES + head - saved + sum(overhead.values())


def test_commands_import_neither_torch_nor_vendors(draft: Draft, tmp_path: Path) -> None:
    source, out = str(draft.checkpoint.folder), str(tmp_path / "out")
    assert main(["quantize", source, "--recipe", "fp8-ptpc", "--out", out]) == 0
    commands = [
        ["inspect", source], ["plan", source, "--recipe", "int4-channel"],
        ["verify", out, "--against", source],
    ]  # fmt: skip
    code = f"""
import sys
from draftquant.scripts.cli import main
heavy = {{"torch", "transformers", "quark", "modelopt", "compressed_tensors", "scipy"}}
for command in {commands!r}:
    print(main(command), heavy & sys.modules.keys(), file=sys.stderr)
"""
    command_line = [sys.executable, "-c", code]
    run = subprocess.run(command_line, capture_output=True, text=True, check=True)
    assert run.stderr == "0 set()\n" * 3


@pytest.mark.parametrize("words", ["mi355-mxfp4-learned", "fp8-ptpc --kv-cache unit"])
def test_a_plan_is_told_and_what_it_made(words: str, draft: Draft, tmp_path: Path) -> None:
    given, out = [str(draft.checkpoint.folder), "--recipe", *words.split()], str(tmp_path / "out")
    assert main(["plan", *given]) == 0
    if "learned" not in words:
        assert main(["quantize", *given, "--out", out]) == 0
        assert main(["inspect", out]) == main(["verify", out, "--against", given[0]]) == 0


# ---- plans of several formats: which linear has which, what is refused, what would load and cost


@pytest.fixture
def wide_draft(tmp_path: Path) -> Draft:
    folder = tiny_eagle3_llama(tmp_path / "draft", **WIDE["eagle3-llama"])
    return draft_of(folder)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "gpus"),
    [("mi325x-w4a8", {"MI325X"}), ("w4a8", {"H200", "B200", "A100", "MI325X", "MI355X"})],
)
def test_recipes_are_listed_for_the_gpu_that_is_asked_for(
    name: str, gpus: set[str], draft: Draft
) -> None:
    recipe = dataclasses.replace(load_recipe("mi325x-w4a8"), name=name)
    plan = make_plan(recipe, draft)
    said = nothing_loads(plan, planned_verdicts(plan)) or ""
    lists = [line for line in said.splitlines() if "these load" in line]
    assert {line.split()[1] for line in lists} == gpus
    assert any("on MI325X (gfx942) these load: mi325x-w4a8-fp8, int4-" in line for line in lists)
    assert all(line.count(",") < 5 for line in lists)


def test_every_linear_has_the_format_of_its_rule(wide_draft: Draft) -> None:
    plan = make_plan(MIXES["fp8-int4-qkv-nvfp4-down"], wide_draft)
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
    assert len(make_plan(again, wide_draft).declared()["config_groups"]) == 2


def test_two_formats_in_a_fused_linear(wide_draft: Draft) -> None:
    recipe = mixed(NVFP4, (FP8, ("*.gate_proj.weight",)))
    with pytest.raises(PlanError, match="are fused by every engine, but would have") as caught:
        make_plan(recipe, wide_draft)
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
    layout: LayoutName, own: Format, other: Format, why: str, fix: str, wide_draft: Draft
) -> None:
    recipe = dataclasses.replace(mixed(own, (other, DOWN)), layout=layout)
    with pytest.raises(LayoutError, match=why) as caught:
        make_plan(recipe, wide_draft)
    assert str(other) in caught.value.what
    assert caught.value.fix == fix
