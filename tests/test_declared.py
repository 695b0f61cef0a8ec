"""A declaration of ours is what stands in declarations.json, and every key of it is demanded."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import readings
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.stored.layouts.scheme import OwnFormat
from draftquant.quantize.verify import verify
from draftquant.recipes import Recipe, WeightFormat, load_recipe
from draftquant.recipes.formats import NUMBER_FORMATS, KvCacheFormat
from draftquant.recipes.schema import LayoutName
from tiny import edit_json, tiny_eagle3_llama
from told import check_told
from verify_cases import ACTIVATIONS, assert_only_fault, edit_declaration, quantized

KEPT = ("embed_tokens", "fc", "lm_head")
ONE = load_recipe("fp8-ptpc")
CACHE = KvCacheFormat(dtype="fp8_e4m3", scales="measured")
LITERAL = json.loads((Path(__file__).parent / "declarations.json").read_text(encoding="utf-8"))
"""Layout -> formats -> [quantization_config, side files], keys in their order."""


def weight_formats() -> Iterator[WeightFormat]:
    for dtype, number in NUMBER_FORMATS.items():
        for granularity, sizes in number.sizes.items():
            for size in sizes or (None,):
                weights = WeightFormat(
                    dtype=dtype, granularity=granularity, group_size=size, symmetric=True
                )
                yield weights
                if dtype == "int4":
                    yield dataclasses.replace(weights, scale_dtype="float16")
                if (dtype, granularity) == ("int4", "channel"):
                    yield dataclasses.replace(weights, first_stage="fp8_e4m3")


def recipes_of(layout: str) -> list[Recipe]:
    """Every pair of formats that a layout can express."""
    pairs = itertools.product(weight_formats(), ACTIVATIONS.values())
    named = cast("LayoutName", layout)
    every = [dataclasses.replace(ONE, layout=named, weights=w, activations=a) for w, a in pairs]
    return [recipe for recipe in every if get_layout(named).problem(recipe) is None]


def declared(recipe: Recipe, *own: OwnFormat) -> list[object]:
    layout = get_layout(recipe.layout)
    written = layout.declare(recipe, KEPT, own)
    return [written, layout.side_files(written)]


@pytest.mark.parametrize("name", LITERAL)
def test_every_pair_of_formats_is_declared_word_for_word(name: str) -> None:
    recipes, found = recipes_of(name), {}
    for each in recipes:
        scales = each.weights.scale_dtype or "as the weight"
        found[f"{each.formats[0]}; scales {scales}"] = declared(each)
    if get_layout(recipes[0].layout).cache_problem is None:
        found["KV cache"] = declared(dataclasses.replace(recipes[0], kv_cache=CACHE))
    if get_layout(recipes[0].layout).mix_problem is None:
        found["mixed"] = declared(recipes[0], OwnFormat(recipes[-1], ("b.0",)))
    assert json.dumps(found) == json.dumps(LITERAL[name])


def test_what_is_understood_at_each_place_of_a_declaration() -> None:
    check_told("readings", readings.readings())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """draft/ and its folder by ModelOpt's layout, out/."""
    folder = tmp_path_factory.mktemp("declared")
    tiny_eagle3_llama(folder / "draft")
    quantized(folder / "draft", folder / "out", "blackwell-fp8")
    return folder


CONFIG, SIDE = "config.json", "hf_quant_config.json"
DECLARED = "config.json: quantization_config"
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "ignore": lambda d: d.pop("ignore"),
    "config_groups.group_0.input_activations": (
        lambda d: d["config_groups"]["group_0"].pop("input_activations")
    ),
    "producer.version": lambda d: d["producer"].update(version="9"),
    "version": lambda d: d.update(version="1"),
}


@pytest.mark.parametrize("key", EDITS)
def test_an_edited_declaration_is_a_fault(key: str, made: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(made / "out", tmp_path / "out"))
    assert verify(out, made / "draft").faults == ()
    edit_declaration(out, EDITS[key])
    assert_only_fault(verify(out, made / "draft"), f"{DECLARED}.{key}", "expected")


def test_a_side_file_and_a_declaration_that_are_gone(made: Path, tmp_path: Path) -> None:
    """The side file alone still says how to decode, but engines find it only by chance."""
    out = Path(shutil.copytree(made / "out", tmp_path / "out"))
    edit_json(out / SIDE, version="1")
    assert_only_fault(verify(out, made / "draft"), f"{SIDE}: version", "expected")
    (out / SIDE).unlink()
    assert_only_fault(verify(out, made / "draft"), SIDE, "got none")
    shutil.copyfile(made / "out" / SIDE, out / SIDE)
    shutil.copyfile(made / "draft" / CONFIG, out / CONFIG)
    assert_only_fault(verify(out, made / "draft"), DECLARED, "got null")
