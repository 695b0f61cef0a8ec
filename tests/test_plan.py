"""The plan: claims, refusals, counts and bytes on tiny drafts."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from by_recipe import WIDE, draft_of, planned
from draftquant.quantize.drafts import Draft
from draftquant.quantize.engines.plan_verdicts import nothing_loads, planned_verdicts
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import Expectation, Format, Recipe, Rule, built_in_recipes, load_recipe
from draftquant.recipes.errors import LayoutError, PlanError
from draftquant.scripts.cli import main
from folder_rows import FILES, read_rows, write_folder
from mixes import DOWN, FP8, FP8_STATIC, INT4, MIXES, MXFP4, NVFP4, PER_TOKEN, mixed
from tiny import tiny_eagle3_llama
from tiny_dspark import tiny_dspark_mla
from tiny_mla import tiny_eagle3_mla

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


def refused(chosen: Recipe, draft: Draft) -> None:
    """What is said of it is kept in told/plan.txt."""
    with pytest.raises(PlanError) as caught:
        make_plan(chosen, draft)
    assert caught.value.where == f"recipe {chosen.name}"


# Claims


MISPELT = keep("midlayer.self_attn.o_porj.weight")
KV_UP = Rule(role=("kv_up",), action="keep", why="engines absorb it")
WITHOUT_HEAD = dataclasses.replace(OTHERS, role=("fusion", "embedding", "norm"))
NORM = Rule(tensor=("norm.weight",), action="quantize")

REFUSED: list[tuple[tuple[Rule, ...], int]] = [
    ((QUANTIZE, OTHERS, MISPELT), 7), ((QUANTIZE, OTHERS, KV_UP), 7), ((QUANTIZE, WITHOUT_HEAD), 7),
    ((QUANTIZE, OTHERS, keep("*.o_proj.weight"), keep("midlayer.*.o_proj.*")), 7),
    ((QUANTIZE, OTHERS, NORM), 7), ((QUANTIZE, OTHERS), 6),
    *(((QUANTIZE, OTHERS, keep(f"*.{part}.weight")), 6)
      for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")),  # of a fused linear
]  # fmt: skip


def test_rules_that_do_not_fit_are_refused(draft: Draft) -> None:
    for rules, count in REFUSED:
        refused(recipe(*rules, count=count), draft)


def test_patterns_match_canonical_names_too(draft: Draft) -> None:
    whole = recipe(QUANTIZE, OTHERS, keep("layers.0.self_attn.[qkv]_proj.weight"), count=4)
    assert len(make_plan(whole, draft).quantized) == 4


def test_linear_kept_in_one_layer_only(tmp_path: Path) -> None:
    """An exclude cannot say which layer: engines number them in their own way."""
    draft = read(tmp_path / "draft", num_layers=2)
    rules = (QUANTIZE, OTHERS, keep("layers.0.self_attn.[qkvo]_proj.weight"))
    refused(recipe(*rules, count=5), draft)


def test_the_sizes_of_groups_that_fit_all_linears_are_named(tmp_path: Path) -> None:
    for hidden, intermediate in ((192, 320), (96, 320), (192, 72)):
        sizes = {"hidden": hidden, "intermediate": intermediate, "head_dim": 64}
        folder = tmp_path / f"{hidden} {intermediate}"
        with pytest.raises(LayoutError):
            make_plan(load_recipe("int4-group128"), read(folder, **sizes))


def sizes(name: str, draft: Draft) -> str:
    """Which are kept in told/plan.txt."""
    plan = make_plan(load_recipe(name), draft)
    assert plan.bytes_before == draft.checkpoint.nbytes
    return f"{name}: {plan.bytes_before} to {plan.bytes_after} bytes, {dict(plan.overhead())}"


def test_bytes_of_every_recipe(tmp_path: Path) -> None:
    draft = read(tmp_path / "draft", **WIDE["eagle3-llama"])
    assert len({sizes(name, draft) for name in built_in_recipes()}) == len(built_in_recipes())


def test_commands_import_neither_torch_nor_vendors(draft: Draft, tmp_path: Path) -> None:
    source, out = str(draft.checkpoint.folder), str(tmp_path / "out")
    assert main(["quantize", source, "--recipe", "fp8-ptpc", "--out", out]) == 0
    rows = {row["draft"]: row for row in read_rows(FILES["broken on purpose"])}
    wrong = write_folder(rows["nvfp4-global-scales-differ"], tmp_path / "wrong")
    commands = [
        ["inspect", source], ["plan", source, "--recipe", "int4-channel"],
        ["verify", out, "--against", source], ["verify", out, "--against", source, "--foreign"],
        ["check", str(wrong), "--engine", "vllm"],
    ]  # fmt: skip
    code = f"""
import sys
from draftquant.scripts.cli import main
heavy = {{"torch", "transformers", "quark", "modelopt", "compressed_tensors", "scipy"}}
for command in {commands!r}:
    print(main(command), heavy & sys.modules.keys(), file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == "0 set()\n" * 4 + "1 set()\n"


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
    return draft_of(tiny_eagle3_llama(tmp_path / "draft", **WIDE["eagle3-llama"]))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "gpus"),
    [("mi325x-w4a8", {"MI325X"}), ("w4a8", {"H200", "B200", "A100", "MI325X", "MI355X"})],
)
def test_recipes_are_listed_for_the_gpu_asked_for(name: str, gpus: set[str], draft: Draft) -> None:
    plan = make_plan(dataclasses.replace(load_recipe("mi325x-w4a8"), name=name), draft)
    said = nothing_loads(plan, planned_verdicts(plan)) or ""
    lists = [line for line in said.splitlines() if "these load" in line]
    assert {line.split()[1] for line in lists} == gpus
    assert any("on MI325X (gfx942) these load: mi325x-w4a8-fp8, int4-" in line for line in lists)
    assert all(line.count(",") < 5 for line in lists)


def test_every_linear_has_the_format_of_its_rule(wide_draft: Draft) -> None:
    plan = make_plan(MIXES["fp8-int4-qkv-nvfp4-down"], wide_draft)
    assert {s.row.module.rpartition(".")[2]: plan.format_of(s) for s in plan.quantized} == {
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


MXFP4_FP8 = Format(weights=MXFP4.weights, activations=PER_TOKEN)


def test_formats_that_do_not_go_together(wide_draft: Draft) -> None:
    """Two in a fused linear, and those that a layout cannot declare."""
    with pytest.raises(PlanError):
        make_plan(mixed(NVFP4, (FP8, ("*.gate_proj.weight",))), wide_draft)
    for layout, own, other in (
        ("quark", FP8, FP8_STATIC),
        ("modelopt", NVFP4, FP8_STATIC),
        ("compressed-tensors", NVFP4, MXFP4_FP8),
    ):
        with pytest.raises(LayoutError):
            make_plan(dataclasses.replace(mixed(own, (other, DOWN)), layout=layout), wide_draft)


def test_nvfp4_that_a_class_of_mla_takes_as_floats(tmp_path: Path) -> None:
    for build, engine, error in (
        (tiny_eagle3_mla, "sglang", "param_data.shape=torch.Size([64, 192])"),
        (tiny_dspark_mla, "vllm", "markov_head.markov_w2.weight has the shape [96, 8]"),
    ):
        plan = planned(build(tmp_path / engine), "blackwell-nvfp4-weights", target_layers=8)
        said = {str(each.engine): each for each in planned_verdicts(plan, arch="sm90")}
        assert said[engine].verdict == "REFUSED"
        assert error in str(said[engine].error)
        assert said["vllm"].verdict == ("REFUSED" if engine == "vllm" else "LOADS")
