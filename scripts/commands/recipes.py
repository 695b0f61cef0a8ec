"""`draftquant recipes`: list the built-in ones, show one resolved, check a file."""

import argparse
import typing
from collections.abc import Iterable
from typing import Any

import yaml

from ...quantize.drafts import FAMILIES
from ...quantize.engines.contract import EngineName
from ...quantize.engines.registry import choose
from ...quantize.gpus import GPUS, architecture, gpus_of
from ...recipes import (
    Recipe,
    aliases,
    built_in_recipes,
    load_recipe,
    recipe_sha256,
    to_mapping,
)
from ...recipes.decode import nearest
from ...recipes.errors import RecipeError
from ...recipes.expectations import LoadsOn
from ...recipes.formats import NUMBER_FORMATS
from ..console import print_document, print_json, print_table, stderr, stdout, table
from ..examples import EXAMPLES
from ..parsers import sentence
from .common import named_recipe

VERBS = {
    "list": "the built-in recipes, those of a GPU, an engine or a family if asked",
    "show": "one recipe, resolved: what is hashed and stored",
    "check": "report every problem of a recipe file",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`recipes [list | show NAME | check FILE]`."""
    actions = parser.add_subparsers(dest="action", metavar="VERB")
    listing, show, check = (
        actions.add_parser(
            verb,
            help=summary,
            description=sentence(summary),
            examples=EXAMPLES[f"recipes {verb}"],
        )
        for verb, summary in VERBS.items()
    )
    listing.add_argument("--engine", choices=typing.get_args(EngineName), help="only what it loads")
    listing.add_argument("--arch", metavar="GPU", help="only for mi325x, h200, b200, sm90, ...")
    listing.add_argument(
        "--family", metavar="FAMILY", help="only for drafts of eagle3-llama, eagle3-mla, ..."
    )
    show.add_argument("recipe", metavar="RECIPE", help="name, alias or .yaml path")
    check.add_argument("recipe", metavar="RECIPE", help="name, alias or .yaml path")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`; 1 if nothing is listed."""
    if options.action == "show":
        recipe = named_recipe(options.recipe)
        if options.json:
            print_json(to_mapping(recipe) | {"sha256": recipe_sha256(recipe)})
        else:
            print_document(f"# sha256 of the resolved recipe: {recipe_sha256(recipe)}")
            print_document(yaml.safe_dump(to_mapping(recipe), sort_keys=False, width=100))
    elif options.action == "check":
        recipe = named_recipe(options.recipe)
        if options.json:
            print_json({"recipe": recipe.name, "rules": len(recipe.rules), "good": True})
        else:
            stdout().line(f"{options.recipe}: good ({recipe.name}, {len(recipe.rules)} rules)")
    else:
        return _list(options)
    return 0


def _list(options: argparse.Namespace) -> int:
    engine, gpu, family = (getattr(options, key, None) for key in ("engine", "arch", "family"))
    arch = architecture(gpu) if gpu else None
    names = [each.name for each in FAMILIES]
    if family is not None and family not in names:
        raise RecipeError("--family", f"no family {family!r}", fix=nearest(family, names))
    asked = engine or arch or family
    recipes = [
        recipe
        for recipe in map(load_recipe, built_in_recipes())
        if not asked or any(_loads(place, engine, arch, family) for place in recipe.loads_on)
    ]
    if not recipes:
        stderr().line(_why_none(engine, gpu, arch, family))
    if options.json:
        print_json([_mapping(recipe) for recipe in recipes])
    elif recipes:
        _print(recipes)
    return 0 if recipes else 1


def _mapping(recipe: Recipe) -> dict[str, Any]:
    more = {"aliases": _aliases(recipe), "emulated_on": _emulated(recipe)}
    return to_mapping(recipe) | more


def _print(recipes: Iterable[Recipe]) -> None:
    spare = "backend", "layout", "algorithm"
    columns = "name", "alias", "weights", "activations", "algorithm", "layout", "backend"
    found = table("Recipes", *columns, "loads on", spare=spare)
    for recipe in recipes:
        found.row(
            recipe.name,
            ", ".join(_aliases(recipe)),
            _each(form.weights for form in recipe.formats),
            _each(form.activations or "none" for form in recipe.formats),
            recipe.algorithm.name,
            recipe.layout,
            recipe.backend,
            _places(recipe),
        )
    print_table(found)


def _places(recipe: Recipe) -> str:
    """Where the result loads, and where that is no use for speed."""
    places = "; ".join(map(str, recipe.loads_on)) or "no stock engine"
    slow = ", ".join(f"{gpus_of(arch)} ({arch})" for arch in _emulated(recipe))
    return f"{places}; emulated on {slow}: slower than BF16" if slow else places


def _emulated(recipe: Recipe) -> list[str]:
    """GPUs where it loads that neither multiply nor widen its 4-bit floats: docs/estimate.md."""
    numbers = [NUMBER_FORMATS[form.weights.dtype] for form in recipe.formats]
    archs = dict.fromkeys(arch for place in recipe.loads_on for arch in place.arch)
    slow = {gpu.arch for gpu in GPUS.values() if any(map(gpu.emulates, numbers))}
    return [arch for arch in archs if arch in slow]


def _why_none(
    engine: EngineName | None, gpu: str | None, arch: str | None, family: str | None
) -> str:
    """Why nothing is listed: nobody executed the engine there, or it refuses every recipe."""
    asked = [f"--engine {engine}" if engine else "", f"--arch {gpu}" if gpu else ""]
    asked += [f"--family {family}" if family else ""]
    words = " ".join(filter(None, asked))
    known = choose(engine) if engine else None
    if known is not None and arch is not None and arch not in known.gpus:
        return (
            f"{words}: no recipe is listed, because {known.name} {known.version} was never executed"
            f" on {arch}: it is known on {', '.join(known.gpus)}"
        )
    return (
        f"{words}: what no built-in recipe makes is known to load there; 'draftquant check FOLDER'"
        " says why of a folder"
    )


def _aliases(recipe: Recipe) -> list[str]:
    return [alias for alias, name in aliases().items() if name == recipe.name]


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
