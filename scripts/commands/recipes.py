"""`draftquant recipes`: list the built-in ones, show one resolved, check a file."""

import argparse
from collections.abc import Iterable

import yaml

from ...quantize.gpus import gpus_of
from ...recipes import recipe_sha256, to_mapping
from ..api.recipes import (
    ListedRecipe,
    RecipesListSettings,
    recipes_check,
    recipes_list,
    recipes_show,
)
from ..console import OnTerminal, print_document, print_json, print_table, stdout, table
from .verbs import Below, Verbs, run_verb

DEFAULT = "list"


def run(options: argparse.Namespace) -> int:
    """Run the verb; without one, list all."""
    if options.verb is None:
        options.settings = RecipesListSettings(watch=OnTerminal())
        return _list(options)
    return run_verb(options, VERBS)


def _list(options: argparse.Namespace) -> int:
    """1 if there is none."""
    found = recipes_list.run(options.settings)
    if options.json:
        print_json([one.to_mapping() for one in found])
    elif found:
        _print(found)
    return 0 if found else 1


def _show(options: argparse.Namespace) -> int:
    recipe = recipes_show.run(options.settings)
    if options.json:
        print_json(to_mapping(recipe) | {"sha256": recipe_sha256(recipe)})
    else:
        print_document(f"# sha256 of the resolved recipe: {recipe_sha256(recipe)}")
        print_document(yaml.safe_dump(to_mapping(recipe), sort_keys=False, width=100))
    return 0


def _check(options: argparse.Namespace) -> int:
    recipe = recipes_check.run(options.settings)
    if options.json:
        print_json({"recipe": recipe.name, "rules": len(recipe.rules), "good": True})
    else:
        given = options.settings.recipe
        stdout().line(f"{given}: good ({recipe.name}, {len(recipe.rules)} rules)")
    return 0


VERBS: Verbs = {
    "list": Below(
        recipes_list, _list, "the built-in recipes, those of a GPU, an engine or a family if asked"
    ),
    "show": Below(recipes_show, _show, "one recipe, resolved: what is hashed and stored"),
    "check": Below(recipes_check, _check, "report every problem of a recipe file"),
}


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
