"""The verbs of `recipes`: list the built-in ones, show one resolved, check a file."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Annotated, Any

from typing_extensions import override

from ...quantize.engines.contract import EngineName
from ...quantize.gpus import GPUS, architecture, gpu_name, gpu_names
from ...recipes import Recipe, aliases, built_in_recipes, load_recipe, to_mapping
from ...recipes.brief import Brief
from ...recipes.decode import nearest
from ...recipes.errors import RecipeError
from ...recipes.expectations import LoadsOn
from ...recipes.formats import NUMBER_FORMATS
from .opening import named_recipe
from .option import Argument, Option
from .references import AnyRecipe
from .settings import Settings
from .verb import verb


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
    from ...quantize.engines.registry import choose

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
