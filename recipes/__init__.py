"""Recipes say, as data, what becomes of each tensor of a draft. Imports no other package."""

from .errors import DraftQuantError, RecipeError
from .expectations import Expectation, GateChoice
from .library import aliases, built_in_recipes, load_recipe, recipe_of_alias
from .schema import (
    ActivationFormat,
    Algorithm,
    Format,
    Recipe,
    Rule,
    WeightFormat,
    recipe_sha256,
    to_mapping,
)

__all__ = [
    "ActivationFormat",
    "Algorithm",
    "DraftQuantError",
    "Expectation",
    "Format",
    "GateChoice",
    "Recipe",
    "RecipeError",
    "Rule",
    "WeightFormat",
    "aliases",
    "built_in_recipes",
    "load_recipe",
    "recipe_of_alias",
    "recipe_sha256",
    "to_mapping",
]
