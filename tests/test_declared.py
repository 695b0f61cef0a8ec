"""A declaration of ours is what stands in declarations.json, and every key of it is demanded."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.stored.layouts.scheme import OwnFormat
from draftquant.quantize.verify import verify
from draftquant.recipes import Recipe, WeightFormat, load_recipe
from draftquant.recipes.formats import NUMBER_FORMATS, KvCacheFormat
from draftquant.recipes.schema import LayoutName
from tiny import tiny_eagle3_llama
from verify_cases import ACTIVATIONS, assert_only_fault, quantized

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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """draft/ and its folder by ModelOpt's layout, out/."""
    folder = tmp_path_factory.mktemp("declared")
    tiny_eagle3_llama(folder / "draft")
    quantized(folder / "draft", folder / "out", "blackwell-fp8")
    return folder


Edit = Callable[[dict[str, Any]], object]
CONFIG, SIDE = "config.json", "hf_quant_config.json"
DECLARED = "config.json: quantization_config"


def of_config(change: Edit) -> Edit:
    return lambda config: change(config["quantization_config"])


EDITS: dict[str, tuple[str, Edit, str]] = {
    "no ignore": (CONFIG, of_config(lambda d: d.pop("ignore")), f"{DECLARED}.ignore"),
    "half a group": (
        CONFIG, of_config(lambda d: d["config_groups"]["group_0"].pop("input_activations")),
        f"{DECLARED}.config_groups.group_0.input_activations",
    ),
    "another producer": (
        CONFIG, of_config(lambda d: d["producer"].update(version="9")),
        f"{DECLARED}.producer.version",
    ),
    "a key without meaning": (
        CONFIG, of_config(lambda d: d.update(version="1")), f"{DECLARED}.version",
    ),
    "side file with a note": (
        SIDE, lambda d: d.update(version="1"), "hf_quant_config.json: version",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_declaration_is_a_fault(name: str, made: Path, tmp_path: Path) -> None:
    file, change, where = EDITS[name]
    out = Path(shutil.copytree(made / "out", tmp_path / "out"))
    assert verify(out, made / "draft").faults == ()
    content = json.loads((out / file).read_text(encoding="utf-8"))
    change(content)
    (out / file).write_text(json.dumps(content), encoding="utf-8")
    assert_only_fault(verify(out, made / "draft"), where, "expected")


def test_no_side_file_and_no_declaration_in_config(made: Path, tmp_path: Path) -> None:
    """The side file alone still says how to decode, but engines find it only by chance."""
    out = Path(shutil.copytree(made / "out", tmp_path / "out"))
    (out / SIDE).rename(tmp_path / SIDE)
    assert_only_fault(verify(out, made / "draft"), SIDE, "got none")
    (tmp_path / SIDE).rename(out / SIDE)
    shutil.copyfile(made / "draft" / CONFIG, out / CONFIG)
    assert_only_fault(verify(out, made / "draft"), DECLARED, "got null")
