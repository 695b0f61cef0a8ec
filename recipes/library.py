"""Finding recipes: built-in ones by name, a user's own by path, and `extends` one level deep."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

from .decode import nearest
from .errors import RecipeError
from .recipe_file import Problem, RecipeFileError, compose, decode, merge
from .refused import REFUSED, refusal
from .schema import Recipe, to_mapping
from .schemes import DIFFERENT, SAME, spelled

_FOLDER = Path(__file__).parent
_ALIASES: Mapping[str, str] = {
    "b200": "blackwell-fp8-mla",
    "gb200": "blackwell-fp8-mla",
    "gh200": "fp8-ptpc",
    "h100": "fp8-ptpc",
    "h200": "fp8-ptpc",
    "mi300x": "mi325x-fp8",
    "mi325x": "mi325x-fp8",
    "mi350x": "mi325x-fp8",
    "mi355x": "mi325x-fp8",
}
"""GPU -> the recipe to begin with there: engines load its result for every family, and nothing has
to be recorded before; a test asks `loads_on`."""
_OTHER_GPUS = ("a100", "gfx942", "gfx950", "sm80", "sm90", "sm100")
"""Of which none is the one to begin with."""
_NEVER_EXECUTED = {
    "b300": "b200",
    "gb300": "gb200",
    "sm103": "b200",
    "l40s": "h100",
    "sm89": "h100",
}
"""GPU on which no engine was executed -> one with the same number formats, of the table above."""
_CALIBRATED = ("-learned", "-gptq")
"""How the names of built-in recipes end that round on calibration traces, the better one first."""
_SUFFIXES = (".yaml", ".yml")
_ALGORITHM_KEYS = ("algorithm.scale", "algorithm.rounding")


def built_in_recipes() -> tuple[str, ...]:
    """Names of the shipped recipes, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def aliases() -> Mapping[str, str]:
    """Short names of recipes: that of a GPU -> the built-in recipe to begin with there."""
    return _ALIASES


def recipe_of_alias(name: str) -> str | None:
    """The built-in recipe that a GPU's name or another tool's scheme is; None = `name` is neither.

    In any case of letters: `MI325X`, `FP8_DYNAMIC`, `mtq.NVFP4_DEFAULT_CFG`.
    """
    return _ALIASES.get(name.lower()) or SAME.get(spelled(name))


def calibrated(name: str) -> str | None:
    """The built-in recipe that rounds as this one stores, on calibration traces."""
    return next((one for end in _CALIBRATED if (one := f"{name}{end}") in built_in_recipes()), None)


def load_recipe(reference: str | Path) -> Recipe:
    """Load a recipe by built-in name (`mi325x-w4a8`), alias (`mi325x`, `W4A16`) or path.

    Raises:
        RecipeError: no such recipe; RecipeFileError with every fault of the file if it is wrong.
    """
    path = _locate(reference)
    node = _extended(_compose(path), path)
    backend = str(_find(node, "backend")[1].value)

    def explain(key: str, text: str) -> tuple[str, str] | None:
        refused = REFUSED.get((backend, text)) if key in _ALGORITHM_KEYS else None
        return (f"backend {backend}: {refused.reason}", refused.fix) if refused else None

    recipe = decode(Recipe, node, explain=explain)
    refused = refusal(recipe.backend, recipe.algorithm)
    if refused is not None:
        mark = _find(node, "algorithm")[1].start_mark
        what = f"algorithm: backend {recipe.backend}, {recipe.algorithm}: {refused.reason}"
        raise _at(Path(mark.name), mark.line, what, refused.fix)
    if recipe.name != path.stem:
        line = _find(node, "name")[1].start_mark.line
        raise RecipeFileError(
            [
                Problem(
                    str(path),
                    line + 1,
                    f"name: expected {path.stem!r}, got {recipe.name!r}",
                    f"write 'name: {path.stem}', or rename the file to {recipe.name}{path.suffix}",
                )
            ]
        )
    return recipe


def recipe_file(recipe: Recipe) -> str:
    """The shortest file that is this recipe: what it changes of a built-in one, or all of it."""
    own = to_mapping(recipe)
    files = [own]
    for name in built_in_recipes():
        base = to_mapping(load_recipe(name))
        changed = {key: value for key, value in own.items() if base.get(key, ...) != value}
        extends_none = _find(_compose(_FOLDER / f"{name}.yaml"), "extends")[0] is None
        if extends_none and merged(base, changed) == own:
            files.append({"extends": name, **changed})
    return min((yaml.safe_dump(each, sort_keys=False, width=10**6, default_flow_style=None)
                for each in files), key=len)  # fmt: skip


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `over` replace those of `base`; mappings merge, lists do not: as files extend."""
    both = {
        key: merged(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **both}


def _compose(path: Path) -> MappingNode:
    return compose(path, ours=path.parent == _FOLDER)


def _locate(reference: str | Path) -> Path:
    text = str(reference)
    text = recipe_of_alias(text) or text
    if text in built_in_recipes():
        return _FOLDER / f"{text}.yaml"
    path = Path(text)
    if path.is_dir():
        raise RecipeError(text, "is a folder, not a recipe", fix=_nearest_recipe(path.name))
    if path.is_file() and path.suffix not in _SUFFIXES:
        raise RecipeError(text, "expected a .yaml file", fix=_nearest_recipe(path.stem))
    if _is_path(text):
        if path.is_file():
            return path
        raise RecipeError(text, "no such recipe file", fix="check the path")
    fix = _nearest_recipe(text)
    if spelled(text) not in DIFFERENT:
        fix += " (or give a .yaml path)"
    raise RecipeError(text, "no built-in recipe has this name", fix=fix)


def _nearest_recipe(name: str) -> str:
    """What was probably meant: a near scheme, a recipe that is spelled alike, or with the word."""
    if spelled(name) in DIFFERENT:
        return DIFFERENT[spelled(name)]
    if near := _NEVER_EXECUTED.get(name.lower()):
        return f"use '{_ALIASES[near]}', as on {near}: no engine was executed on {name}"
    if name.lower() in _OTHER_GPUS:
        return f"'draftquant recipes list --gpu {name}' lists the recipes that load there"
    names = *_ALIASES, *built_in_recipes()
    holding = [each for each in built_in_recipes() if name.lower() in each]
    close = difflib.get_close_matches(name.lower(), names, n=1)
    if close or not holding:
        return nearest(name.lower(), names if close else built_in_recipes())
    return f"did you mean one of: {', '.join(holding)}?"


def _is_path(reference: str) -> bool:
    return reference.endswith(_SUFFIXES) or "/" in reference


def _extended(node: MappingNode, path: Path) -> MappingNode:
    key, value = _find(node, "extends")
    if key is None:
        return node
    line = value.start_mark.line
    if not isinstance(value, ScalarNode) or not value.value:
        raise _at(path, line, "extends: expected one recipe name", "name one recipe")
    if [k.value for k, _ in node.value].count("extends") > 1:
        raise _at(path, line, "extends: key given twice", "keep one of the two")
    named = value.value
    try:
        base_path = _locate(path.parent / named if _is_path(named) else named)
    except RecipeError as exc:
        raise _at(path, line, f"extends: {named!r}: {exc.what}", exc.fix) from exc
    base = _compose(base_path)
    extended, below = _find(base, "extends")
    if extended is not None:
        raise _at(
            path,
            line,
            f"extends: {named!r} extends another recipe itself",
            f"write 'extends: {below.value}' and what {named} changes: only one level is allowed",
        )
    if _find(node, "name")[0] is None:
        raise _at(path, 0, "name: it is missing", f"add 'name: {path.stem}'")
    own = MappingNode(
        node.tag,
        [(k, v) for k, v in node.value if k.value != "extends"],
        node.start_mark,
        node.end_mark,
    )
    return merge(base, own)


def _find(node: MappingNode, name: str) -> tuple[ScalarNode, ScalarNode] | tuple[None, ScalarNode]:
    for key, value in node.value:
        if key.value == name:
            return key, value
    return None, ScalarNode("", "", node.start_mark)


def _at(path: Path, line: int, what: str, fix: str) -> RecipeFileError:
    return RecipeFileError([Problem(str(path), line + 1, what, fix)])
