"""Names of other tools' schemes: an alias has the very number formats that the tool's name has."""

import re
from typing import Any

import pytest
from draftquant.recipes import RecipeError, aliases, built_in_recipes, load_recipe, recipe_of_alias
from draftquant.recipes.schema import ActivationFormat, WeightFormat
from draftquant.recipes.schemes import DIFFERENT, SAME, spelled
from vendors import needs

CHANNEL = ("fp8_e4m3", "channel", None)
TOKEN = ("fp8_e4m3", "token", True)
BY_DTYPE = {("int", 4): "int4", ("float", 8): "fp8_e4m3", ("int", 8): "int8"}
FP4 = {16: "nvfp4", 32: "mxfp4"}
BY_HAND = {  # --qformat of ModelOpt's examples, SGLang's method, and Quark's templates
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


def of_modelopt(config: Any) -> Numbers:
    """The same of a config of ModelOpt: the last entry for a kind of quantizer holds."""
    off = {"enable": False}  # as "*" has it, which stands first
    cfgs = {
        kind: [off, *(e for e in config["quant_cfg"] if e["quantizer_name"] == f"*{kind}")][-1]
        for kind in ("weight_quantizer", "input_quantizer")
    }

    def numbers(entry: Any) -> Any:
        if entry.get("enable") is False:
            return None
        cfg = entry["cfg"]
        blocks = cfg.get("block_sizes", {})
        size = blocks.get(-1)
        if cfg["num_bits"] == (2, 1):
            return FP4[size], "group", size
        dtype = {4: "int4", (4, 3): "fp8_e4m3"}[cfg["num_bits"]]
        if -1 in blocks:
            return (dtype, "group", size) if size else (dtype, "token", True)
        return dtype, "tensor" if cfg["axis"] is None else "channel", None

    weights, inputs = numbers(cfgs["weight_quantizer"]), numbers(cfgs["input_quantizer"])
    if inputs is not None and inputs[1] != "token":
        inputs = (inputs[0], inputs[1], inputs[1] == "group")
    return weights, inputs


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


@pytest.mark.slow
@needs("modelopt")
def test_an_alias_is_the_config_of_modelopt_and_every_other_config_has_a_hint() -> None:
    import modelopt.torch.quantization as mtq

    configs = {spelled(name): getattr(mtq, name) for name in dir(mtq) if name.endswith("_CFG")}
    found = {name: of_modelopt(made) for name, made in configs.items() if name in SAME}
    assert found == {scheme: ours(SAME[scheme]) for scheme in found}
    assert len(found) == 6
    parts = ("mlp", "experts", "mamba", "kv", "four_over_six", "w4a4")
    whole = {name for name in configs if not any(part in name for part in parts)}
    assert len(whole) > 15
    assert whole <= SAME.keys() | DIFFERENT.keys()


def test_what_no_package_here_defines_is_as_its_documentation_has_it() -> None:
    assert {scheme: ours(SAME[scheme]) for scheme in BY_HAND} == BY_HAND


def test_no_name_has_two_meanings() -> None:
    assert not SAME.keys() & DIFFERENT.keys()
    assert not (SAME.keys() | DIFFERENT.keys()) & {*aliases(), *built_in_recipes()}
    assert set(SAME.values()) <= set(built_in_recipes())


def test_the_case_and_the_ending_of_a_scheme_do_not_matter() -> None:
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
