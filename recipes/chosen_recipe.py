"""A recipe as a caller asks for it: name, file or keys, with a backend or algorithm of choice."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .decode import walk
from .errors import RecipeError
from .formats import FP8_CACHE, KvCacheFormat, KvCacheScales
from .library import calibrated, load_recipe, merged, recipe_of_alias
from .listener import SILENT, Listener
from .python_values import PythonValue
from .schema import CORRECTED, BackendName, InputCorrection, Recipe, to_mapping
from .schemes import named_algorithm, refusal

AnyRecipe = Recipe | Mapping[str, Any] | str | Path
"""A recipe: a built-in name, a file, a resolved recipe, or the keys of a file as a dict."""


@dataclass(frozen=True, slots=True)
class RecipeChoice:
    """A recipe, and what replaces its own backend, algorithm or KV cache.

    Attributes:
        algorithm: one of `ALGORITHMS`, computed by torch unless `backend` says otherwise.
        kv_cache: scales of an FP8 KV cache, whatever the recipe says about one.
    """

    recipe: AnyRecipe
    backend: BackendName | None = None
    algorithm: str | None = None
    input_correction: InputCorrection | None = None
    kv_cache: KvCacheScales | None = None


def chosen_recipe(choice: RecipeChoice, listener: Listener = SILENT) -> Recipe:
    """The recipe of a choice; the listener is told which recipe an alias stands for."""
    chosen = named_recipe(choice.recipe, listener)
    if choice.algorithm:
        chosen = with_algorithm(chosen, choice.algorithm, choice.backend or "torch")
    elif choice.backend:
        chosen = dataclasses.replace(chosen, backend=choice.backend)
    if choice.input_correction:
        chosen = _with_input_correction(chosen, choice.input_correction)
    if choice.kv_cache:
        cache = KvCacheFormat(dtype=FP8_CACHE, scales=choice.kv_cache)
        chosen = dataclasses.replace(chosen, kv_cache=cache)
    _check_backend(f"recipe {chosen.name}:", chosen)
    return chosen


def named_recipe(reference: AnyRecipe, listener: Listener = SILENT) -> Recipe:
    """A recipe by name, alias, file or keys, or itself; the listener is told what an alias is."""
    if isinstance(reference, Recipe):
        return reference
    if isinstance(reference, Mapping):
        return recipe_of_keys(reference)
    recipe = load_recipe(str(reference))
    if recipe_of_alias(str(reference)):
        better = calibrated(recipe.name)
        advice = f"; if the gate says INCONCLUSIVE: {better}, with --traces" if better else ""
        listener.note(f"recipe {reference} is {recipe.name}: {recipe.summary}{advice}")
    return recipe


def recipe_of_keys(keys: Mapping[str, Any]) -> Recipe:
    """A recipe from a dict with the keys of a recipe file, `extends` too, under the same rules."""
    given = dict(keys)
    if "extends" in given:
        base = to_mapping(load_recipe(str(given.pop("extends"))))
        given = merged({key: base[key] for key in base if key != "name"}, given)
    recipe, misfits = walk(Recipe, PythonValue(given))
    if misfits:
        problems = [(f"recipe, {m.key or 'as a whole'}", m.what, m.fix) for m in misfits]
        (where, what, fix), *others = problems
        more = [f"{at}: {problem}" for at, problem, _ in others]
        raise RecipeError(where, what, fix=fix or "see recipes/README.md", details=more)
    _check_backend("recipe, algorithm:", recipe)
    return typing.cast(Recipe, recipe)


def with_algorithm(recipe: Recipe, name: str, backend: BackendName) -> Recipe:
    """A recipe with an algorithm of `ALGORITHMS`, which the backend must be able to run."""
    scale, rounding = named_algorithm(name, backend)
    coarse = any(form.has_coarse_inputs for form in recipe.formats)
    corrects = coarse and rounding in CORRECTED and backend == "torch"
    algorithm = dataclasses.replace(
        recipe.algorithm.rounded(rounding, scale=scale),
        input_correction="auto" if corrects else "off",
    )
    return dataclasses.replace(recipe, algorithm=algorithm, backend=backend)


def _with_input_correction(recipe: Recipe, choice: InputCorrection) -> Recipe:
    algorithm = recipe.algorithm
    if choice == "auto" and algorithm.rounding not in CORRECTED:
        where = f"--input-correction auto, recipe {recipe.name}"
        what = f"rounding {algorithm.rounding} measures nothing of the inputs"
        fix = "leave it out, or use --algorithm gptq or --algorithm learned"
        raise RecipeError(where, what, fix=fix)
    algorithm = dataclasses.replace(algorithm, input_correction=choice)
    return dataclasses.replace(recipe, algorithm=algorithm)


def _check_backend(where: str, recipe: Recipe) -> None:
    refused = refusal(recipe.backend, recipe.algorithm)
    if refused is not None:
        subject = f"{where} backend {recipe.backend}, {recipe.algorithm}"
        raise RecipeError(subject, refused.reason, fix=refused.fix)
