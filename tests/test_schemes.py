"""Names of other tools' schemes; which recipe each is stands in told/combinations.txt."""

import re

import pytest
from draftquant.recipes import RecipeError, aliases, built_in_recipes, load_recipe, recipe_of_alias
from draftquant.recipes.schemes import DIFFERENT, SAME, spelled


@pytest.mark.slow
def test_every_preset_of_llm_compressor_is_an_alias_or_has_a_hint() -> None:
    scheme = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    names = {*map(spelled, scheme.PRESET_SCHEMES)} - {"unquantized"}
    assert names <= SAME.keys() | DIFFERENT.keys()
    assert {"fp8_dynamic", "w4a16", "nvfp4", "mxfp4", "nvfp4a16", "mxfp4a16"} <= names & SAME.keys()


def test_a_name_has_one_meaning_however_it_is_written() -> None:
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
