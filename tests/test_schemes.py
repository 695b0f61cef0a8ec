"""Names of other tools' schemes: an alias has the very number formats that the tool's name has."""

import re
from typing import Any

import pytest
from draftquant.recipes import RecipeError, aliases, built_in_recipes, load_recipe, recipe_of_alias
from draftquant.recipes.schema import ActivationFormat, WeightFormat
from draftquant.recipes.schemes import DIFFERENT, SAME, spelled

CHANNEL = ("fp8_e4m3", "channel", None)
TOKEN = ("fp8_e4m3", "token", True)
BY_DTYPE = {("int", 4): "int4", ("float", 8): "fp8_e4m3", ("int", 8): "int8"}
FP4 = {16: "nvfp4", 32: "mxfp4"}
BY_HAND = {  # ModelOpt 0.47's configs, its --qformat, SGLang's method, and Quark's templates
    "fp8_default": (("fp8_e4m3", "tensor", None), ("fp8_e4m3", "tensor", False)),
    "fp8_per_channel_per_token": (CHANNEL, TOKEN),
    "int4_blockwise_weight_only": (("int4", "group", 128), None),
    "mxfp4_default": (("mxfp4", "group", 32), ("mxfp4", "group", True)),
    "nvfp4_default": (("nvfp4", "group", 16), ("nvfp4", "group", True)),
    "w4a16_nvfp4": (("nvfp4", "group", 16), None),
    "fp8_pc_pt": (CHANNEL, TOKEN),
    "w8a8_fp8": (CHANNEL, TOKEN),
    "ptpc_fp8": (CHANNEL, TOKEN),
    "int4_wo_128": (("int4", "group", 128), None),
    "int4_wo_per_channel": (("int4", "channel", None), None),
    "mxfp4_weight_only": (("mxfp4", "group", 32), None),
}
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


def of_compressed_tensors(scheme: Any) -> Numbers:
    """The same of a preset, which llm-compressor's modifiers take by name."""

    def dtype(args: Any) -> str:
        small = args.type == "float" and args.num_bits == 4
        return FP4[args.group_size] if small else BY_DTYPE[args.type, args.num_bits]

    weights, inputs = scheme.weights, scheme.input_activations
    assert weights.symmetric
    granularity = weights.strategy.replace("tensor_group", "group")
    of_inputs = inputs and (
        dtype(inputs),
        inputs.strategy.replace("tensor_group", "group"),
        bool(inputs.dynamic),
    )
    return (dtype(weights), granularity, weights.group_size), of_inputs


def test_an_alias_is_the_preset_of_llm_compressor_and_every_other_preset_has_a_hint() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, QuantizationScheme

    found = {
        spelled(name): of_compressed_tensors(QuantizationScheme(targets=[], **made))
        for name, made in PRESET_SCHEMES.items()
        if spelled(name) in SAME
    }
    assert found == {scheme: ours(SAME[scheme]) for scheme in found}
    fp4 = {"nvfp4", "mxfp4", "nvfp4a16", "mxfp4a16"}
    assert found.keys() == {"fp8_dynamic", "w4a16", *fp4}
    assert {*map(spelled, PRESET_SCHEMES)} - {"unquantized"} <= SAME.keys() | DIFFERENT.keys()


def test_a_name_has_one_meaning_however_it_is_written() -> None:
    assert {scheme: ours(SAME[scheme]) for scheme in BY_HAND} == BY_HAND
    assert not SAME.keys() & DIFFERENT.keys()
    assert not (SAME.keys() | DIFFERENT.keys()) & {*aliases(), *built_in_recipes()}
    assert set(SAME.values()) <= set(built_in_recipes())
    for name in ("FP8_DYNAMIC", "fp8-dynamic", "Fp8-Dynamic_CFG"):
        assert recipe_of_alias(name) == load_recipe(name).name == "fp8-ptpc"


def test_a_scheme_that_no_recipe_is_has_a_hint() -> None:
    for scheme, hint in DIFFERENT.items():
        with pytest.raises(RecipeError, match="no built-in recipe has this name") as caught:
            load_recipe(scheme.upper())
        assert caught.value.fix.startswith(hint)
        named = re.findall(r"'([^']+)'", caught.value.fix)
        assert named
        assert set(named) <= set(built_in_recipes())
