"""Names of other tools' schemes: an alias has the very number formats that the tool's name has."""

import re
from typing import Any

import pytest
from draftquant.recipes import RecipeError, aliases, built_in_recipes, load_recipe, recipe_of_alias
from draftquant.recipes.schema import ActivationFormat, WeightFormat
from draftquant.recipes.schemes import DIFFERENT, SAME, spelled

CHANNEL = ("fp8_e4m3", "channel", None)
TOKEN = ("fp8_e4m3", "token", True)
NVFP4, MXFP4 = ("nvfp4", "group", 16), ("mxfp4", "group", 32)
INT4_GROUPS = ("int4", "group", 128)
BY_HAND = {
    # presets of compressed-tensors 0.20, which llm-compressor's modifiers take by name
    "fp8_dynamic": (CHANNEL, TOKEN),
    "w4a16": (INT4_GROUPS, None),
    "nvfp4": (NVFP4, ("nvfp4", "group", True)),
    "nvfp4a16": (NVFP4, None),
    "mxfp4": (MXFP4, ("mxfp4", "group", True)),
    "mxfp4a16": (MXFP4, None),
    # ModelOpt 0.47's configs and its --qformat
    "fp8_default": (("fp8_e4m3", "tensor", None), ("fp8_e4m3", "tensor", False)),
    "fp8_per_channel_per_token": (CHANNEL, TOKEN),
    "fp8_pc_pt": (CHANNEL, TOKEN),
    "int8_weight_only": (("int8", "channel", None), None),
    "int4_blockwise_weight_only": (INT4_GROUPS, None),
    "mxfp4_default": (MXFP4, ("mxfp4", "group", True)),
    "nvfp4_default": (NVFP4, ("nvfp4", "group", True)),
    "w4a16_nvfp4": (NVFP4, None),
    # SGLang's method, and Quark's templates
    "w8a8_fp8": (CHANNEL, TOKEN),
    "ptpc_fp8": (CHANNEL, TOKEN),
    "int4_wo_128": (INT4_GROUPS, None),
    "int4_wo_per_channel": (("int4", "channel", None), None),
    "mxfp4_weight_only": (MXFP4, None),
}
"""Number formats of weights and inputs of every scheme that a recipe is."""
Numbers = tuple[Any, Any]


def ours(name: str) -> Numbers:
    """Number formats of a recipe's weights and inputs."""
    recipe = load_recipe(name)
    weights: WeightFormat = recipe.weights
    inputs: ActivationFormat | None = recipe.activations
    assert weights.symmetric
    assert weights.carrier is weights.first_stage is None
    return (
        (weights.dtype, weights.granularity, weights.group_size),
        inputs and (inputs.dtype, inputs.granularity, inputs.dynamic),
    )


@pytest.mark.slow
def test_every_preset_of_llm_compressor_is_an_alias_or_has_a_hint() -> None:
    scheme = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    names = {*map(spelled, scheme.PRESET_SCHEMES)} - {"unquantized"}
    assert names <= SAME.keys() | DIFFERENT.keys()
    assert {"fp8_dynamic", "w4a16", "nvfp4", "mxfp4", "nvfp4a16", "mxfp4a16"} <= names & SAME.keys()


def test_a_name_has_one_meaning_however_it_is_written() -> None:
    assert {scheme: ours(recipe) for scheme, recipe in SAME.items()} == BY_HAND
    assert not SAME.keys() & DIFFERENT.keys()
    assert not (SAME.keys() | DIFFERENT.keys()) & {*aliases(), *built_in_recipes()}
    assert set(SAME.values()) <= set(built_in_recipes())
    for name in ("FP8_DYNAMIC", "fp8-dynamic", "Fp8-Dynamic_CFG"):
        assert recipe_of_alias(name) == load_recipe(name).name == "fp8-ptpc"


@pytest.mark.parametrize("scheme", DIFFERENT)
def test_a_scheme_that_no_recipe_is_has_a_hint(scheme: str) -> None:
    hint = DIFFERENT[scheme]
    with pytest.raises(RecipeError, match="no built-in recipe has this name") as caught:
        load_recipe(scheme.upper())
    assert caught.value.fix.startswith(hint)
    named = re.findall(r"'([^']+)'", caught.value.fix)
    assert named
    assert set(named) <= set(built_in_recipes())
