"""The verbs of `recipes`: list the built-in ones, show one resolved, check a file."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from typing_extensions import override

from ...quantize.engines.contract import EngineName
from ...quantize.gpus import GPUS, architecture, gpu_name, gpu_names
from ...recipes import Recipe, aliases, built_in_recipes, load_recipe, recipe_sha256, to_mapping
from ...recipes.brief import Brief
from ...recipes.chosen_recipe import AnyRecipe, named_recipe
from ...recipes.decode import nearest
from ...recipes.errors import RecipeError
from ...recipes.formats import NUMBER_FORMATS
from ...recipes.schema import LoadsOn
from ..frame.console import OnTerminal, print_document, print_json, print_table, stdout, table
from ..frame.settings import Argument, Option, Settings
from ..frame.verb import Below, Verbs, run_verb, verb

if TYPE_CHECKING:
    from ...recipes.schema import LoadsOn


@cache
def loaded_families() -> tuple[str, ...]:
    """The families that recipes name where their results load."""
    recipes = map(load_recipe, built_in_recipes())
    every = (name for one in recipes for place in one.loads_on for name in place.family)
    return tuple(dict.fromkeys(every))


@dataclass(frozen=True, slots=True)
class RecipesListSettings(Settings):
    """Which recipes are listed; all where nothing is asked."""

    _: KW_ONLY
    engine: Annotated[EngineName | None, Option("show only recipes that this engine loads")] = None
    gpu: Annotated[
        str | None, Option("show only recipes for this GPU (mi325x, h200, b200, ...)", "GPU")
    ] = None
    family: Annotated[
        str | None,
        Option("show only recipes for this family (eagle3-llama, eagle3-mla, ...)", "FAMILY"),
    ] = None


@dataclass(frozen=True, slots=True)
class RecipeSettings(Settings):
    """Which recipe."""

    recipe: Annotated[AnyRecipe, Argument("recipe: a name, an alias or a .yaml file", "RECIPE")]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ListedRecipe(Brief):
    """A built-in recipe.

    Attributes:
        recipe: the resolved recipe.
        aliases: its other names.
        emulated_on: architectures of GPUs that load the result but have no instructions for its
            4-bit floats; a draft is slower there than in BF16.
    """

    recipe: Recipe
    aliases: tuple[str, ...]
    emulated_on: tuple[str, ...]

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        more = {"aliases": list(self.aliases), "emulated_on": list(self.emulated_on)}
        return to_mapping(self.recipe) | more

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "name": self.recipe.name,
            "summary": self.recipe.summary,
            "aliases": ", ".join(self.aliases),
            "loads in": ", ".join(dict.fromkeys(place.engine for place in self.recipe.loads_on)),
        }


@verb(RecipesListSettings)
def recipes_list(settings: RecipesListSettings) -> tuple[ListedRecipe, ...]:
    """List the built-in recipes: all, or those for a GPU, an engine or a family of drafts.

    Returns:
        The recipes by name. An empty list is explained in the log.

    Raises:
        RecipeError: there is no family of this name.
        CheckpointError: there is no GPU of this name.
    """
    from ...quantize.drafts import FAMILIES

    arch = architecture(settings.gpu) if settings.gpu else None
    families = [each.name for each in FAMILIES]
    if settings.family is not None and settings.family not in families:
        what = f"no family {settings.family!r}"
        raise RecipeError("--family", what, fix=nearest(settings.family, families))
    asked = settings.engine or arch or settings.family
    found = [
        recipe
        for recipe in map(load_recipe, built_in_recipes())
        if not asked or places(recipe, settings)
    ]
    if not found:
        settings.listener.line(_why_none(settings, arch))
    return tuple(map(_listed, found))


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


def _listed(recipe: Recipe) -> ListedRecipe:
    names = tuple(alias for alias, name in aliases().items() if name == recipe.name)
    return ListedRecipe(recipe=recipe, aliases=names, emulated_on=_emulated(recipe))


def _emulated(recipe: Recipe) -> tuple[str, ...]:
    numbers = [NUMBER_FORMATS[form.weights.dtype] for form in recipe.formats]
    archs = dict.fromkeys(arch for place in recipe.loads_on for arch in place.arch)
    slow = {gpu.arch for gpu in GPUS.values() if any(map(gpu.emulates, numbers))}
    return tuple(arch for arch in archs if arch in slow)


def _why_none(settings: RecipesListSettings, arch: str | None) -> str:
    """Why nothing is listed: nobody executed the engine there, or it refuses every recipe."""
    from ...quantize.engines.versions import choose

    asked = {"--engine": settings.engine, "--gpu": settings.gpu, "--family": settings.family}
    words = " ".join(f"{option} {value}" for option, value in asked.items() if value)
    known = choose(settings.engine) if settings.engine else None
    if known is not None and arch is not None and arch not in known.gpus:
        return (
            f"{words}: no recipe is listed, because {known.name} {known.version} was never executed"
            f" on {gpu_name(arch, settings.gpu)}: it is known on {gpu_names(known.gpus)}"
        )
    return (
        f"{words}: no built-in recipe makes a draft that is known to load there;"
        " 'draftquant check FOLDER' says why a given folder does not"
    )


def places(recipe: Recipe, asked: RecipesListSettings) -> tuple[LoadsOn, ...]:
    """Where the recipe's result loads, as far as it is asked."""
    arch = architecture(asked.gpu) if asked.gpu else None
    return tuple(
        replace(place, arch=place.arch if arch is None else (arch,))
        for place in recipe.loads_on
        if asked.engine in (None, place.engine)
        and (arch is None or arch in place.arch)
        and (asked.family is None or asked.family in place.family)
    )


# ---- `draftquant recipes`: list the built-in ones, show one resolved, check a file

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
