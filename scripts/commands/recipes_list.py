"""`draftquant recipes list`: the built-in recipes, as a table."""

import argparse
from collections.abc import Iterable

from ...quantize.gpus import gpus_of
from ..api.recipes import ListedRecipe, recipes_list
from ..console import print_json, print_table, table

VERB = recipes_list


def run(options: argparse.Namespace) -> int:
    """Print the recipes; 1 if there is none."""
    found = recipes_list.run(options.settings)
    if options.json:
        print_json([one.to_mapping() for one in found])
    elif found:
        _print(found)
    return 0 if found else 1


def _print(recipes: Iterable[ListedRecipe]) -> None:
    spare = "backend", "layout", "algorithm"
    columns = "name", "alias", "weights", "activations", "algorithm", "layout", "backend"
    found = table("Recipes", *columns, "loads on", spare=spare)
    for listed in recipes:
        recipe = listed.recipe
        found.row(
            recipe.name,
            ", ".join(listed.aliases),
            _each(form.weights for form in recipe.formats),
            _each(form.activations or "none" for form in recipe.formats),
            recipe.algorithm.name,
            recipe.layout,
            recipe.backend,
            _places(listed),
        )
    print_table(found)


def _places(listed: ListedRecipe) -> str:
    """Where the result loads, and where that is no use for speed."""
    places = "; ".join(map(str, listed.recipe.loads_on)) or "no stock engine"
    slow = ", ".join(f"{gpus_of(arch)} ({arch})" for arch in listed.emulated_on)
    return f"{places}; emulated on {slow}: slower than BF16" if slow else places


def _each(formats: Iterable[object]) -> str:
    """Of a recipe's formats, its own first."""
    return "; ".join(dict.fromkeys(map(str, formats)))
