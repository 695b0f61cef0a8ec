"""Excludes: every engine finds what is kept, and nothing else, under the names that it uses."""

import dataclasses
import re
from pathlib import Path

import pytest
from asked_pairs import check_draft
from cases import FAMILIES, NUM_TARGET_LAYERS, Workshop
from draftquant.quantize.engines.contract import EngineCheck, EngineName
from draftquant.quantize.verify import verify
from draftquant.recipes import Expectation, Recipe, Rule
from draftquant.scripts.cli import main
from formats import FamilyName, format_recipe
from tiny import config_of, edit_json
from tiny_mla import tiny_eagle3_mla

FP8_STATIC = format_recipe("fp8", "fp8-tensor", "fp8-static")
FP8_BLOCK = format_recipe("fp8", "fp8-block", "fp8-group")
ONE_OF_EACH_LAYOUT = (
    format_recipe("quark", "fp8-channel", "fp8-token"),
    format_recipe("modelopt", "fp8-tensor", "fp8-static"),
    format_recipe("compressed-tensors", "fp8-channel", "fp8-token"),
    FP8_STATIC,
    format_recipe("awq", "int4-group128-float16", "weights-only"),
)
KV_B = f"model.layers.{NUM_TARGET_LAYERS}.self_attn.kv_b_proj"
MLP = {"gate_up_proj", "down_proj"}
KEPT = {"fc", "context_proj", "lm_head", "kv_b_proj", "markov_w2"}
KEPT |= {"kernel_projection", "hidden_projection"}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("excludes"))


def half(recipe: Recipe, quantized: str) -> Recipe:
    """The recipe for attention or MLP alone; the other one is kept."""
    kept = "mlp" if quantized == "attention" else "attention"
    rules = (
        Rule(role=(quantized,), action="quantize"),  # type: ignore[arg-type]
        Rule(role=(kept,), action="keep", why="the other half"),  # type: ignore[arg-type]
    )
    expect = Expectation(quantized_per_layer=3 if quantized == "mlp" else 4)
    return dataclasses.replace(recipe, rules=(*rules, *recipe.rules[1:]), expect=expect)


@pytest.mark.some(5)
@pytest.mark.parametrize("recipe", ONE_OF_EACH_LAYOUT, ids=lambda recipe: recipe.layout)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantized", ["attention", "mlp"])
def test_engines_take_as_quantized_exactly_what_is(
    workshop: Workshop, family: FamilyName, recipe: Recipe, quantized: str
) -> None:
    source = workshop.source(family, dtype="F16" if recipe.layout == "awq" else "BF16")
    name = f"{family}-{recipe.layout}-{quantized}"
    folder = workshop.quantize(source, half(recipe, quantized), name)  # verified on the way
    engines: list[EngineName] = ["vllm", "sglang"]
    for engine in engines[:1] if family == "dspark-mla" else engines:  # which vLLM alone serves
        answer = check_draft(folder, engine=engine, arch="sm90", target_layers=NUM_TARGET_LAYERS)
        assert len(answer.linears) >= 4  # those of one layer, as engines fuse them
        taken = {name.rpartition(".")[2] for name, how in answer.linears.items() if how}
        leaves = {name.rpartition(".")[2] for name in answer.linears} - KEPT
        assert taken == (leaves & MLP if quantized == "mlp" else leaves - MLP)
        if engine == "vllm":
            assert answer.verdict == "LOADS", answer.error


# Whole names: plain fp8 on MLA, whose kv_b_proj is kept


def on_vllm(folder: Path, target_layers: int | None) -> EngineCheck:
    return check_draft(folder, engine="vllm", arch="sm90", target_layers=target_layers)


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", [FP8_STATIC, FP8_BLOCK], ids=lambda recipe: recipe.name)
def test_fp8_on_mla_loads_where_the_target_is_known(workshop: Workshop, recipe: Recipe) -> None:
    source = workshop.source("eagle3-mla", num_layers=2)
    folder = workshop.quantize(source, recipe, f"whole-{recipe.name}")
    found = config_of(folder)["quantization_config"]
    assert KV_B in found["modules_to_not_convert"] == found["ignored_layers"]
    assert on_vllm(folder, NUM_TARGET_LAYERS).verdict == "LOADS"
    other = on_vllm(folder, NUM_TARGET_LAYERS + 2)  # another target than it was made for
    assert other.verdict == "LOADS BUT WRONG"
    assert "kv_b_proj.weight from BF16 to F8_E4M3" in (other.error or "")
    unknown = on_vllm(folder, None)
    assert (unknown.verdict, "--target-layers" in (unknown.error or "")) == ("UNKNOWN", True)
    assert verify(folder, source).ok
    for key in ("ignored_layers", "modules_to_not_convert"):
        found[key].remove(KV_B)
    edit_json(folder / "config.json", quantization_config=found)
    (fault,) = verify(folder, source).faults
    # One number of two is left, so which of the two layers it is of cannot be told.
    assert re.fullmatch(r"config.json: model\.layers\.\d+\.self_attn\.kv_b_proj", fault.where)
    assert fault.expected == "excluded: it is kept"
    assert on_vllm(folder, NUM_TARGET_LAYERS).verdict == "LOADS BUT WRONG"


def test_verify_finds_patterns_that_match_fused_names_alone(workshop: Workshop) -> None:
    """No stored name ends so; the linear that engines build from quantized ones does."""
    source = workshop.source("eagle3-llama")
    folder = workshop.quantize(source, ONE_OF_EACH_LAYOUT[2], "over")
    right = config_of(folder)["quantization_config"]
    for pattern in ("re:.*kv_proj$", "re:.*e_up_proj$"):
        wrong = right | {"ignore": [*right["ignore"], pattern]}
        edit_json(folder / "config.json", quantization_config=wrong)
        expected = {fault.expected for fault in verify(folder, source).faults}
        assert expected == {"not excluded: it is quantized"}
        assert on_vllm(folder, NUM_TARGET_LAYERS).verdict == "REFUSED"


def test_transcode_takes_the_number(workshop: Workshop, tmp_path: Path) -> None:
    recipe = format_recipe("compressed-tensors", "fp8-tensor", "fp8-static")
    folder = workshop.quantize(workshop.source("eagle3-mla"), recipe, "by-pattern")
    out = tmp_path / "out"
    asked = ["transcode", str(folder), "--layout", "fp8", "--out", str(out)]
    assert main(asked) == 2
    assert main([*asked, "--target-layers", "61"]) == 0
    assert (
        "model.layers.61.self_attn.kv_b_proj"
        in config_of(out)["quantization_config"]["ignored_layers"]
    )


def test_the_commands_take_the_number(tmp_path: Path) -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}  # of a target of any depth
    folder = str(tiny_eagle3_mla(tmp_path / "draft", hidden=128, intermediate=256, config=layers))
    out, recipe = str(tmp_path / "out"), tmp_path / "plain.yaml"
    recipe.write_text("extends: blackwell-fp8\nname: plain\nlayout: fp8\n", encoding="utf-8")
    common = ["--recipe", str(recipe), "--input-scale", "1.0", "--out", out]
    assert main(["quantize", folder, *common]) == 2
    assert main(["quantize", folder, *common, "--target-layers", "61"]) == 0
    vllm = ["check", out, "--engine", "vllm", "--gpu", "sm90"]
    for given, code in (([], 3), (["61"], 0), (["62"], 1), (["0"], 2)):
        assert main([*vllm, *(["--target-layers"] * len(given)), *given]) == code
