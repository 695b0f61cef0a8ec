"""Finding recipes: built-in ones by name, a user's own by path, and what they extend."""

import dataclasses
import difflib
import functools
import io
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.events import CollectionEndEvent, CollectionStartEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from . import schemes
from .decode import Misfit, MisfitError, Tree, nearest, walk
from .errors import RecipeError, visible
from .regular_file import read_text
from .schema import Recipe, to_mapping
from .strict_json import reading

# Nodes of a recipe file keep the file and line that they come from, even after `extends` has merged
# two files.

MAX_RECIPE_BYTES = 16 * 2**10  # our files have 2 kB; PyYAML takes half a second for this much
_DEEPEST = 32
_MOST_SHOWN = 50
_LONGEST_NUMBER = 40  # digits and signs

_SCALARS: dict[type, tuple[str, str]] = {
    str: ("tag:yaml.org,2002:str", "text"),
    int: ("tag:yaml.org,2002:int", "a whole number"),
    float: ("tag:yaml.org,2002:float", "a number"),
    bool: ("tag:yaml.org,2002:bool", "true or false"),
}


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong in a recipe file, with its line (1-based)."""

    file: str
    line: int
    what: str
    fix: str

    def __str__(self) -> str:
        where = f"{visible(self.file)}:{self.line}"
        return f"{where}: {visible(self.what)}\n  fix: {visible(self.fix)}"


class RecipeFileError(RecipeError):
    """Every problem of a recipe file, in the order of its lines."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        first = self.problems[0]
        others = [f"{p.file}:{p.line}: {p.what}; {p.fix}" for p in self.problems[1:_MOST_SHOWN]]
        super().__init__(f"{first.file}:{first.line}", first.what, fix=first.fix, details=others)
        lines = [str(problem) for problem in self.problems[:_MOST_SHOWN]]
        if len(self.problems) > _MOST_SHOWN:
            lines.append(f"and {len(self.problems) - _MOST_SHOWN} problems more")
        self.args = ("\n".join(lines),)


def compose(path: Path) -> MappingNode:
    """The YAML nodes of a file; constructs no object. libyaml reads ours five times as fast."""
    with reading(path, RecipeError, "give a readable recipe file"):
        text = read_text(path, MAX_RECIPE_BYTES)
    try:
        depth = 0
        fast = path.parent == _FOLDER and yaml.__with_libyaml__
        loader_of = yaml.CSafeLoader if fast else yaml.SafeLoader
        for event in yaml.parse(text, loader_of):
            depth += isinstance(event, CollectionStartEvent)
            depth -= isinstance(event, CollectionEndEvent)
            line = event.start_mark.line if event.start_mark else 0
            if depth > _DEEPEST:
                fix = "write the keys as 'draftquant recipes show NAME' prints them"
                raise _at(path, line, "the keys are nested too deeply", fix)
            if getattr(event, "anchor", None) is not None:
                raise _at(path, line, "anchors and aliases are not allowed", "write the value out")
            if (tag := getattr(event, "tag", None)) is not None:
                raise _at(path, line, "tags are not allowed", f"remove {tag!r}")
        stream = io.StringIO(text)
        stream.name = str(path)
        node = loader_of(stream).get_single_node()
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line if exc.problem_mark else 0
        tab = "'\\t'" in str(exc.problem)
        fix = "indent with spaces, not tabs" if tab else "correct the syntax"
        raise _at(path, line, f"not YAML: {exc.problem}", fix) from exc
    except yaml.YAMLError as exc:
        raise RecipeError(path, f"not YAML: {exc}", fix="save it as UTF-8 text") from exc
    if not isinstance(node, MappingNode):
        fix = "start from 'draftquant recipes show NAME'"
        raise _at(path, 0, "expected a mapping of recipe keys", fix)
    _check_keys(path, node)
    return node


def _check_keys(path: Path, node: Node) -> None:
    """Keys are plain words: YAML also allows lists and mappings as keys."""
    if isinstance(node, SequenceNode):
        for item in node.value:
            _check_keys(path, item)
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise _at(path, key.start_mark.line, "a key is not a word", "quote the key")
            _check_keys(path, value)


def merge(base: MappingNode, override: MappingNode) -> MappingNode:
    """`extends`: keys of `override` replace those of `base`; mappings merge, lists do not."""
    inherited = {key.value: value for key, value in base.value}
    overridden = {key.value for key, _ in override.value}
    merged = [(key, value) for key, value in base.value if key.value not in overridden]
    for key, value in override.value:  # a key given twice stays twice: decoding reports it
        below = inherited.get(key.value)
        if isinstance(below, MappingNode) and isinstance(value, MappingNode):
            value = merge(below, value)
        merged.append((key, value))
    return MappingNode(override.tag, merged, override.start_mark, override.end_mark)


def _problem(misfit: "Misfit[_YamlTree]", backend: str) -> Problem:
    """A misfit as decoding words it; for an algorithm that the backend lacks, also the reason."""
    node, what, fix = misfit.at.node, str(misfit), misfit.fix or _BY_THE_SCHEMA
    text = node.value if isinstance(node, ScalarNode) else ""
    refused = schemes.REFUSED.get((backend, text)) if misfit.key in _ALGORITHM_KEYS else None
    if refused is not None:
        what, fix = f"{misfit.key}: backend {backend}: {refused.reason}", refused.fix
    return Problem(node.start_mark.name, node.start_mark.line + 1, what, fix)


_BY_THE_SCHEMA = "see the table of keys in recipes/README.md"


@dataclass(frozen=True, slots=True)
class _YamlTree(Tree):
    """A node as the walker sees it: text, whole numbers and booleans, by the tags of YAML 1.1."""

    node: Node

    def entries(self) -> list[tuple[str, "_YamlTree", "_YamlTree"]]:
        if not isinstance(self.node, MappingNode):
            what = f"expected a mapping, got {self._got()}"
            raise MisfitError(what, "indent its keys below it")
        return [(k.value, _YamlTree(k), _YamlTree(value)) for k, value in self.node.value]

    def items(self) -> "Sequence[_YamlTree]":
        """The items of a list; one value stands for a list of one."""
        items = self.node.value if isinstance(self.node, SequenceNode) else [self.node]
        if not items:
            raise MisfitError("empty list", "remove the key or fill the list")
        return [_YamlTree(item) for item in items]

    def scalar(self, kind: Any) -> object:
        value = self._scalar(kind)
        if value is None:
            wanted = _SCALARS[kind][1]
            if kind is str and (read := self._read_by_yaml()):
                text = self.node.value
                fix = f"quote it ('{text}'): YAML reads {text} as {read}"
                raise MisfitError(f"expected text, got {text}", fix)
            raise MisfitError(f"expected {wanted}, got {self._got()}", f"write {wanted}")
        return value

    def choice(self, choices: tuple[object, ...]) -> object:
        value = self._scalar(type(choices[0]))
        if value is None and getattr(self.node, "tag", "") == _SCALARS[bool][0]:
            value = self.node.value  # a word that YAML reads as true or false: `off`
        if value in choices:
            return value
        expected = ", ".join(map(repr, choices))
        written = self.node.value if isinstance(self.node, ScalarNode) else ""
        if len(choices) == 1:
            what = f"expected {expected}, got {written or self._got()}"
            raise MisfitError(what, f"write {expected}")
        what = f"expected one of {expected}, got {self._got()}"
        raise MisfitError(what, schemes.ABSENT_FORMATS.get(written) or nearest(written, choices))

    def is_null(self) -> bool:
        if not isinstance(self.node, ScalarNode) or self.node.tag != "tag:yaml.org,2002:null":
            return False
        if not self.node.value:
            raise MisfitError("blank value", "write null if that is meant")
        return True

    def _scalar(self, kind: type) -> object | None:
        if kind is float and (whole := self._scalar(int)) is not None:
            return whole
        if not isinstance(self.node, ScalarNode) or self.node.tag != _SCALARS[kind][0]:
            return None
        if kind is not str and len(self.node.value) > _LONGEST_NUMBER:
            return None
        try:
            value: object = SafeConstructor().construct_object(self.node)
        except ValueError:  # 0x_
            return None
        return value

    def _read_by_yaml(self) -> str | None:
        """What YAML 1.1 reads an unquoted word as; None where it is not a word, or is text."""
        if not isinstance(self.node, ScalarNode) or not self.node.value:
            return None
        tag = self.node.tag.rpartition(":")[2]
        if tag == "bool":
            return str(self._scalar(bool)).lower()
        return {"int": "a number", "float": "a number", "timestamp": "a date"}.get(tag)

    def _got(self) -> str:
        if isinstance(self.node, ScalarNode):
            return repr(self.node.value) if self.node.value else "nothing"
        return "a list" if isinstance(self.node, SequenceNode) else "a mapping"


_FOLDER = Path(__file__).parent
_CALIBRATED = ("-learned", "-gptq")
"""Endings of built-in recipes' names for rounding on calibration traces, the better one first."""
_SUFFIXES = (".yaml", ".yml")
_ALGORITHM_KEYS = ("algorithm.scale", "algorithm.rounding")


def built_in_recipes() -> tuple[str, ...]:
    """Names of the shipped recipes, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def aliases() -> Mapping[str, str]:
    """Short names of recipes: the name of a GPU -> the built-in recipe to begin with there."""
    return schemes.FIRST_RECIPES


def recipe_of_alias(name: str) -> str | None:
    """The built-in recipe of a GPU's name or another tool's scheme, in any case, or None."""
    return schemes.FIRST_RECIPES.get(name.lower()) or schemes.SAME.get(schemes.spelled(name))


def calibrated(name: str) -> str | None:
    """The built-in recipe that rounds as this one stores, on calibration traces."""
    return next((one for end in _CALIBRATED if (one := f"{name}{end}") in built_in_recipes()), None)


def load_recipe(reference: str | Path) -> Recipe:
    """Load a recipe by built-in name (`mi325x-w4a8`), alias (`mi325x`, `W4A16`) or path."""
    path = _locate(reference)
    return _built_in(path) if path.parent == _FOLDER else _read(path)


def _read(path: Path) -> Recipe:
    node = _extended(compose(path), path)
    decoded, misfits = walk(Recipe, _YamlTree(node))
    if misfits:
        backend = str(_find(node, "backend")[1].value)
        raise RecipeFileError([_problem(misfit, backend) for misfit in misfits])
    recipe = typing.cast(Recipe, decoded)
    refused = schemes.refusal(recipe.backend, recipe.algorithm)
    if refused is not None:
        mark = _find(node, "algorithm")[1].start_mark
        what = f"algorithm: backend {recipe.backend}, {recipe.algorithm}: {refused.reason}"
        raise _at(Path(mark.name), mark.line, what, refused.fix)
    if recipe.name != path.stem:
        line = _find(node, "name")[1].start_mark.line
        fix = f"write 'name: {path.stem}', or rename the file to {recipe.name}{path.suffix}"
        raise _at(path, line, f"name: expected {path.stem!r}, got {recipe.name!r}", fix)
    return recipe


_built_in = functools.cache(_read)


def recipe_file(recipe: Recipe) -> str:
    """The shortest file that is this recipe: what it changes of a built-in one, or all of it."""
    mapping = to_mapping(recipe)
    files = [mapping]
    for name in built_in_recipes():
        base = to_mapping(load_recipe(name))
        changed = {key: value for key, value in mapping.items() if base.get(key, ...) != value}
        if merged(base, changed) == mapping:
            files.append({"extends": name, **changed})
    return min((yaml.safe_dump(each, sort_keys=False, width=10**6, default_flow_style=None)
                for each in files), key=len)  # fmt: skip


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `over` replace those of `base`; mappings merge, lists do not, as in `extends`."""
    both = {
        key: merged(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **both}


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
    if schemes.spelled(text) not in schemes.DIFFERENT:
        fix += " (or give a .yaml path)"
    raise RecipeError(text, "no built-in recipe has this name", fix=fix)


def _nearest_recipe(name: str) -> str:
    """What was probably meant: a near scheme, a recipe of similar spelling or with the word."""
    if schemes.spelled(name) in schemes.DIFFERENT:
        return schemes.DIFFERENT[schemes.spelled(name)]
    if near := schemes.LIKE.get(name.lower()):
        first = schemes.FIRST_RECIPES[near]
        return f"use '{first}', as on {near}: no engine was executed on {name}"
    if name.lower() in schemes.OTHER_GPUS:
        return f"'draftquant recipes list --gpu {name}' lists the recipes that load there"
    names = *schemes.FIRST_RECIPES, *built_in_recipes()
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
    base = compose(base_path)
    if base_path.parent == _FOLDER:
        base = _extended(base, base_path)
    extended, below = _find(base, "extends")
    if extended is not None:
        what = f"extends: {named!r} extends another recipe itself"
        fix = f"write 'extends: {below.value}' and what {named} changes"
        raise _at(path, line, what, f"{fix}: only built-in recipes may extend another")
    if _find(node, "name")[0] is None:
        raise _at(path, 0, "name: it is missing", f"add 'name: {path.stem}'")
    node.value = [(k, v) for k, v in node.value if k.value != "extends"]
    return merge(base, node)


def _find(node: MappingNode, name: str) -> tuple[ScalarNode, ScalarNode] | tuple[None, ScalarNode]:
    for key, value in node.value:
        if key.value == name:
            return key, value
    return None, ScalarNode("", "", node.start_mark)


def _at(path: Path, line: int, what: str, fix: str) -> RecipeFileError:
    return RecipeFileError([Problem(str(path), line + 1, what, fix)])
