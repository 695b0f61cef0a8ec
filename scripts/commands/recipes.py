"""`draftquant recipes`: list the built-in ones, show one resolved, check a file."""

import argparse

import yaml

from ...recipes import built_in_recipes, load_recipe, recipe_sha256, to_mapping
from ..console import print_document, print_json, print_table, stdout, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`recipes [list | show NAME | check FILE]`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="the built-in recipes")
    listing.add_argument("--json", action="store_true", help="print JSON")
    show = actions.add_parser("show", help="one recipe, resolved: what is hashed and stored")
    show.add_argument("recipe", help="name or .yaml path")
    check = actions.add_parser("check", help="report every problem of a recipe file")
    check.add_argument("recipe", help="name or .yaml path")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    if options.action == "show":
        recipe = load_recipe(options.recipe)
        print_document(f"# sha256 of the resolved recipe: {recipe_sha256(recipe)}")
        print_document(yaml.safe_dump(to_mapping(recipe), sort_keys=False, width=100))
    elif options.action == "check":
        recipe = load_recipe(options.recipe)
        stdout().line(f"{options.recipe}: good ({recipe.name}, {len(recipe.rules)} rules)")
    else:
        _list(as_json=getattr(options, "json", False))
    return 0


def _list(*, as_json: bool) -> None:
    recipes = [load_recipe(name) for name in built_in_recipes()]
    if as_json:
        print_json([to_mapping(recipe) for recipe in recipes])
        return
    found = table("Recipes", "name", "weights", "activations", "layout", "backend", "loads on")
    for recipe in recipes:
        found.row(
            recipe.name,
            str(recipe.weights),
            str(recipe.activations or "none"),
            recipe.layout,
            recipe.backend,
            recipe.loads_on,
        )
    print_table(found)
