"""`draftquant recipes`: list the built-in ones, show one resolved, check a file."""

import argparse
import typing
from collections.abc import Iterable

import yaml

from ...quantize.drafts import FAMILIES
from ...quantize.engines.contract import EngineName
from ...quantize.engines.hardware import architecture
from ...recipes import built_in_recipes, load_recipe, recipe_sha256, to_mapping
from ...recipes.errors import RecipeError
from ...recipes.expectations import LoadsOn
from ..console import print_document, print_json, print_table, stdout, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`recipes [list | show NAME | check FILE]`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="the built-in recipes")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.add_argument(
        "--engine", choices=typing.get_args(EngineName), help="whose results it loads"
    )
    listing.add_argument("--arch", metavar="GPU", help="on which: mi325x, h100, sm90, ...")
    listing.add_argument("--family", metavar="F", help="for drafts of which: eagle3-mla, ...")
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
        _list(options)
    return 0


def _list(options: argparse.Namespace) -> None:
    engine, gpu, family = (getattr(options, key, None) for key in ("engine", "arch", "family"))
    arch = architecture(gpu) if gpu else None
    names = [each.name for each in FAMILIES]
    if family is not None and family not in names:
        raise RecipeError("--family", f"no family {family!r}", fix=f"one of: {', '.join(names)}")
    asked = engine or arch or family
    recipes = [
        recipe
        for recipe in map(load_recipe, built_in_recipes())
        if not asked or any(_loads(place, engine, arch, family) for place in recipe.loads_on)
    ]
    if getattr(options, "json", False):
        print_json([to_mapping(recipe) for recipe in recipes])
        return
    columns = "name", "weights", "activations", "algorithm", "layout", "backend", "loads on"
    found = table("Recipes", *columns)
    for recipe in recipes:
        found.row(
            recipe.name,
            _each(form.weights for form in recipe.formats),
            _each(form.activations or "none" for form in recipe.formats),
            recipe.algorithm.name,
            recipe.layout,
            recipe.backend,
            "; ".join(map(str, recipe.loads_on)) or "no stock engine",
        )
    print_table(found)


def _each(formats: Iterable[object]) -> str:
    """Of a recipe's formats, its own first."""
    return "; ".join(dict.fromkeys(map(str, formats)))


def _loads(place: LoadsOn, engine: str | None, arch: str | None, family: str | None) -> bool:
    """True if the result loads there, as far as it is asked."""
    return (
        engine in (None, place.engine)
        and (arch is None or arch in place.arch)
        and (family is None or family in place.family)
    )
