"""The verbs of `recipes`: list the built-in ones, show one resolved, check a file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from ...quantize.asked import Listing
from ...quantize.gpus import gpu_names
from ...recipes import Recipe, recipe_sha256, to_mapping
from ...recipes.chosen_recipe import AnyRecipe, named_recipe
from ...recipes.listener import Heard
from ..frame import reports
from ..frame.console import print_document, print_table, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...recipes.schema import LoadsOn

DEFAULT = "list"
NOWHERE = "no engine without the draftquant plugin"


@dataclass(frozen=True)
class RecipeSettings(Heard):
    """Which recipe."""

    recipe: AnyRecipe


@verb(Listing)
def recipes_list(settings: Listing) -> "tuple[reports.ListedRecipe, ...]":
    """List the built-in recipes: all, or those for a GPU, an engine or a family of drafts.

    Returns:
        The recipes by name. An empty list is explained in the log.

    Raises:
        RecipeError: there is no family of this name.
        CheckpointError: there is no GPU of this name.
    """
    from ...quantize.listed_recipes import listed_recipes

    return listed_recipes(settings)


@verb(RecipeSettings)
def recipes_show(settings: RecipeSettings) -> Recipe:
    """Resolve a recipe: its own keys, and those of the recipe that it extends.

    Returns:
        The recipe as it is hashed and recorded.

    Raises:
        RecipeError: there is no recipe of this name, or the recipe is wrong.
    """
    return named_recipe(settings.recipe, settings.listener)


@verb(RecipeSettings)
def recipes_check(settings: RecipeSettings) -> Recipe:
    """Check a recipe, and report every problem of it at once.

    Returns:
        The resolved recipe.

    Raises:
        RecipeError: the recipe is wrong; the error names every problem with its line or key.
    """
    return named_recipe(settings.recipe, settings.listener)


def _show_list(listing: "Sequence[reports.ListedRecipe]", settings: Listing) -> None:
    if not listing:
        return
    spare = "backend", "layout", "algorithm"
    columns = "name", "alias", "weights", "activations", "algorithm", "layout", "backend"
    rows = table("Recipes", *columns, "loads on", spare=spare)
    for listed in listing:
        recipe = listed.recipe
        rows.row(
            recipe.name,
            ", ".join(listed.aliases),
            _each(form.weights for form in recipe.formats),
            _each(form.activations or "none" for form in recipe.formats),
            recipe.algorithm.name,
            recipe.layout,
            recipe.backend,
            _places(listed, settings),
        )
    print_table(rows)


def _places(listed: "reports.ListedRecipe", asked: Listing) -> str:
    from ...quantize.listed_recipes import places

    lines = [
        f"{place.engine}: {gpu_names(place.arch, asked.gpu)}{_families(place)}"
        for place in places(listed.recipe, asked)
    ]
    archs = {arch for place in places(listed.recipe, asked) for arch in place.arch}
    if slow := [arch for arch in listed.emulated_on if arch in archs]:
        lines.append(f"emulated on {gpu_names(slow, asked.gpu)}, slower than BF16")
    return "; ".join(lines) or NOWHERE


def _families(place: "LoadsOn") -> str:
    """The families that it does not load, which are fewer."""
    from ...quantize.listed_recipes import loaded_families

    absent = [name for name in loaded_families() if name not in place.family]
    return f" (not {', '.join(absent)})" if absent else ""


def _each(formats: Iterable[object]) -> str:
    return "; ".join(dict.fromkeys(map(str, formats)))


def _show_one(recipe: Recipe, _settings: object) -> None:
    print_document(f"# sha256 of the resolved recipe: {recipe_sha256(recipe)}")
    print_document(yaml.safe_dump(to_mapping(recipe), sort_keys=False, width=100))


COMMANDS = {
    "list": Command(
        recipes_list,
        _show_list,
        lambda listing, _: [listed.to_mapping() for listed in listing],
        exit_code=lambda listing: 0 if listing else 1,
    ),
    "show": Command(
        recipes_show,
        _show_one,
        lambda recipe, _: to_mapping(recipe) | {"sha256": recipe_sha256(recipe)},
    ),
    "check": Command(
        recipes_check,
        lambda recipe, settings: stdout().line(
            f"{settings.recipe}: good ({recipe.name}, {len(recipe.rules)} rules)"
        ),
        lambda recipe, _: {"recipe": recipe.name, "rules": len(recipe.rules), "good": True},
    ),
}
