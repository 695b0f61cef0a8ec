"""`draftquant recipes`: list the built-in ones, show one resolved, check a file."""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

import yaml

from ...quantize.gpus import gpu_names
from ...recipes import recipe_sha256, to_mapping
from ..api.recipes import (
    ListedRecipe,
    RecipesListSettings,
    loaded_families,
    places,
    recipes_check,
    recipes_list,
    recipes_show,
)
from ..console import OnTerminal, print_document, print_json, print_table, stdout, table
from .verbs import Below, Verbs, run_verb

if TYPE_CHECKING:
    from ...recipes.expectations import LoadsOn

DEFAULT = "list"
NOWHERE = "no engine without the draftquant plugin"


def run(options: argparse.Namespace) -> int:
    """Run the verb; without one, list all."""
    if options.verb is None:
        options.settings = RecipesListSettings(listener=OnTerminal())
        return _list(options)
    return run_verb(options, VERBS)


def _list(options: argparse.Namespace) -> int:
    """1 if there is none."""
    found = recipes_list.run(options.settings)
    if options.json:
        print_json([one.to_mapping() for one in found])
    elif found:
        _print(found, options.settings)
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
        recipes_list, _list, "list the built-in recipes, also those for one GPU, engine or family"
    ),
    "show": Below(
        recipes_show, _show, "show one recipe with all that it extends, as it is hashed and stored"
    ),
    "check": Below(recipes_check, _check, "report every problem of a recipe file"),
}


def _print(recipes: Iterable[ListedRecipe], asked: RecipesListSettings) -> None:
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
            _places(listed, asked),
        )
    print_table(found)


def _places(listed: ListedRecipe, asked: RecipesListSettings) -> str:
    """Where the result loads, as far as it was asked, and where that is no use for speed."""
    lines = [
        f"{place.engine}: {gpu_names(place.arch, asked.gpu)}{_families(place)}"
        for place in places(listed.recipe, asked)
    ]
    archs = {arch for place in places(listed.recipe, asked) for arch in place.arch}
    if slow := [arch for arch in listed.emulated_on if arch in archs]:
        lines.append(f"emulated on {gpu_names(slow, asked.gpu)}, slower than BF16")
    return "; ".join(lines) or NOWHERE


def _families(place: "LoadsOn") -> str:
    """Those that it does not load, which are fewer."""
    absent = [name for name in loaded_families() if name not in place.family]
    return f" (not {', '.join(absent)})" if absent else ""


def _each(formats: Iterable[object]) -> str:
    """Of a recipe's formats, its own first."""
    return "; ".join(dict.fromkeys(map(str, formats)))
