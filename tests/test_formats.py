"""Every layout with the formats that it can express: written as made by hand, or refused."""

import dataclasses
import itertools
import typing
from pathlib import Path

import pytest
import weight_formats as known
from by_recipe import draft_of
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import ActivationFormat, Recipe, WeightFormat, load_recipe
from draftquant.recipes.errors import LayoutError
from draftquant.recipes.formats import WeightDtype
from draftquant.recipes.schema import LayoutName
from handmade import MADE, Made, quantize_by_hand
from handmade_numbers import group_width
from tiny import read_tensors, tiny_eagle3_llama
from verify_cases import quantized_folder

BASE = load_recipe("fp8-ptpc")
INT4_SCALES_F16 = dataclasses.replace(known.INT4, scale_dtype="float16")
WEIGHTS = [known.INT4, INT4_SCALES_F16, known.INT4_GROUPS, known.INT4_F16]
WEIGHTS += [known.FP8_CHANNEL, known.FP8_TENSOR, known.FP8_BLOCK, known.NVFP4, known.MXFP4]
WEIGHTS += [known.TWO_STAGES]
MXFP4 = dataclasses.replace(known.PER_GROUP, dtype="mxfp4")
ACTIVATIONS = (None, known.PER_TOKEN, known.STATIC, known.PER_GROUP, known.NVFP4_INPUTS, MXFP4)


def recipe(layout: LayoutName, weights: WeightFormat, inputs: ActivationFormat | None) -> Recipe:
    return dataclasses.replace(BASE, layout=layout, weights=weights, activations=inputs)


CASES = [
    case
    for case in itertools.product(typing.get_args(LayoutName), WEIGHTS, ACTIVATIONS)
    if get_layout(case[0]).problem(recipe(*case)) is None
]

DTYPES: dict[str, WeightDtype] = {"fp8": "fp8_e4m3"}
"""Of those that have another name by hand."""


def recipe_of(made: Made) -> Recipe:
    weights = WeightFormat(
        dtype=DTYPES.get(made.dtype, made.dtype),
        granularity=made.granularity,
        symmetric=True,
        group_size=group_width(made.dtype, made.granularity),
        scale_dtype="float16" if made.layout == "awq" else None,
    )
    if made.activations == "none":
        return recipe(made.layout, weights, None)
    dynamic = known.PER_TOKEN if made.granularity == "channel" else known.PER_GROUP
    return recipe(made.layout, weights, dynamic if made.activations == "dynamic" else known.STATIC)


RAGGED = {"heads": 6, "kv_heads": 2, "head_dim": 48, "hidden": 96, "intermediate": 352}


@pytest.mark.parametrize(
    ("name", "options"),
    [(n, [{}, RAGGED][i % 2]) for i, n in enumerate(MADE) if n != "quark-int4-order"],
)
def test_files_are_those_made_by_hand(name: str, options: dict[str, int], tmp_path: Path) -> None:
    """Every tensor, byte for byte: numerics, packing and layout worked out a second time.

    compressed-tensors takes whole blocks of inputs only; k and v are one and a half blocks of rows.
    """
    if name == "ct-fp8-block":
        options = {"hidden": 128, "intermediate": 384, "heads": 12, "kv_heads": 6, "head_dim": 32}
    source = tiny_eagle3_llama(tmp_path / "draft", **options)
    expected = read_tensors(quantize_by_hand(source, tmp_path / "by-hand", MADE[name], share=True))
    quantized_folder(source, tmp_path / "out", recipe_of(MADE[name]), scale=0.05)
    written = read_tensors(tmp_path / "out")
    assert written.keys() == expected.keys()
    for tensor, stored in written.items():
        assert stored == expected[tensor], tensor


@pytest.mark.parametrize("name", ["awq", "quark-int4", "quark-int4-group"])
def test_rows_that_fill_no_word_are_refused_before_work(name: str, tmp_path: Path) -> None:
    """One key-value head of 4; everything else is as it should be."""
    draft = draft_of(tiny_eagle3_llama(tmp_path / "draft", heads=8, kv_heads=1, head_dim=4))
    with pytest.raises(LayoutError):
        make_plan(recipe_of(MADE[name]), draft)
    wide_enough = tiny_eagle3_llama(tmp_path / "wide", heads=8, kv_heads=2, head_dim=4)
    make_plan(recipe_of(MADE[name]), draft_of(wide_enough))
