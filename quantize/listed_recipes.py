"""Built-in recipes by where their results load, as far as a caller asks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from typing_extensions import override

from ..recipes import Recipe, aliases, built_in_recipes, load_recipe, to_mapping
from ..recipes.brief import Brief
from ..recipes.decode import nearest
from ..recipes.errors import RecipeError
from ..recipes.formats import NUMBER_FORMATS
from ..recipes.schema import LoadsOn
from .asked import Listing
from .drafts import FAMILIES
from .engines.versions import ENGINES
from .gpus import GPUS, architecture, gpu_name, gpu_names


@cache
def loaded_families() -> tuple[str, ...]:
    """The families that recipes name in `loads_on`."""
    recipes = map(load_recipe, built_in_recipes())
    every = (name for recipe in recipes for place in recipe.loads_on for name in place.family)
    return tuple(dict.fromkeys(every))


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


def listed_recipes(asked: Listing) -> tuple[ListedRecipe, ...]:
    """The built-in recipes whose results load where asked, by name; explains an empty list.

    Raises:
        RecipeError: there is no family of this name.
        CheckpointError: there is no GPU of this name.
    """
    arch = architecture(asked.gpu) if asked.gpu else None
    families = [each.name for each in FAMILIES]
    if asked.family is not None and asked.family not in families:
        what = f"no family {asked.family!r}"
        raise RecipeError("--family", what, fix=nearest(asked.family, families))
    is_asked = asked.engine or arch or asked.family
    matching = [
        recipe
        for recipe in map(load_recipe, built_in_recipes())
        if not is_asked or places(recipe, asked)
    ]
    if not matching:
        asked.listener.line(_why_none(asked, arch))
    return tuple(map(_listed, matching))


def _listed(recipe: Recipe) -> ListedRecipe:
    names = tuple(alias for alias, name in aliases().items() if name == recipe.name)
    numbers = [NUMBER_FORMATS[form.weights.dtype] for form in recipe.formats]
    archs = dict.fromkeys(arch for place in recipe.loads_on for arch in place.arch)
    slow = {gpu.arch for gpu in GPUS.values() if any(map(gpu.emulates, numbers))}
    emulated = tuple(arch for arch in archs if arch in slow)
    return ListedRecipe(recipe=recipe, aliases=names, emulated_on=emulated)


def _why_none(asked: Listing, arch: str | None) -> str:
    """Why nothing is listed: nobody ran the engine there, or it refuses every recipe."""
    given = {"--engine": asked.engine, "--gpu": asked.gpu, "--family": asked.family}
    words = " ".join(f"{option} {value}" for option, value in given.items() if value)
    known = ENGINES[asked.engine] if asked.engine else None
    if known is not None and arch is not None and arch not in known.gpus:
        return (
            f"{words}: no recipe is listed, because {known.title} {known.version} was never"
            f" executed on {gpu_name(arch, asked.gpu)}: it is known on {gpu_names(known.gpus)}"
        )
    return (
        f"{words}: no built-in recipe makes a draft that is known to load there;"
        " 'draftquant check FOLDER' says why a given folder does not"
    )


def places(recipe: Recipe, asked: Listing) -> tuple[LoadsOn, ...]:
    """Where the recipe's result loads, as far as a caller asks."""
    arch = architecture(asked.gpu) if asked.gpu else None
    return tuple(
        replace(place, arch=place.arch if arch is None else (arch,))
        for place in recipe.loads_on
        if asked.engine in (None, place.engine)
        and (arch is None or arch in place.arch)
        and (asked.family is None or asked.family in place.family)
    )
