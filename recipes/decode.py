"""Strict decoding of a recipe file: every problem as `file:line: key: what / fix`, all at once.

Decoding works on the YAML node tree, so that each value still knows its file and line, also after
`extends` merged two files. It knows the schema only through its type annotations.
"""

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .errors import RecipeError

DataclassT = TypeVar("DataclassT")

_SCALARS: dict[type, tuple[str, str]] = {
    str: ("tag:yaml.org,2002:str", "text"),
    int: ("tag:yaml.org,2002:int", "a whole number"),
    bool: ("tag:yaml.org,2002:bool", "true or false"),
}


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong in a recipe file, with the line it stands on (1-based)."""

    file: str
    line: int
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}\n  fix: {self.fix}"


class RecipeFileError(RecipeError):
    """Every problem of a recipe file, in the order of its lines."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        first, *rest = self.problems
        super().__init__(f"{first.file}:{first.line}", first.what, fix=first.fix)
        self.args = ("\n".join(map(str, self.problems)) if rest else str(first),)


def compose(path: Path) -> MappingNode:
    """Parse a recipe file into its YAML node tree, without constructing any object.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or is not one mapping of keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise RecipeError(
            path, f"cannot be read: {exc}", fix="give a readable recipe file"
        ) from exc
    try:
        for event in yaml.parse(text):
            line = event.start_mark.line if event.start_mark else 0
            if getattr(event, "anchor", None) is not None:
                raise _one(path, line, "anchors and aliases are not allowed", "write the value out")
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise _one(path, line, "tags are not allowed", f"remove {tag!r}")
        loader = yaml.SafeLoader(text)
        loader.name = str(path)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line if exc.problem_mark else 0
        raise _one(path, line, f"not YAML: {exc.problem}", "correct the syntax") from exc
    except yaml.YAMLError as exc:
        raise RecipeError(path, f"not YAML: {exc}", fix="save it as UTF-8 text") from exc
    except RecursionError as exc:
        raise RecipeError(
            path, "nested too deeply", fix="write the keys as they are shown"
        ) from exc
    if not isinstance(node, MappingNode):
        raise _one(
            path,
            0,
            "expected a mapping of recipe keys",
            "start from 'draftquant recipes show NAME'",
        )
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
                raise _one(path, key.start_mark.line, "a key is not a word", "quote the key")
            _check_keys(path, value)


def merge(base: MappingNode, override: MappingNode) -> MappingNode:
    """`extends`: keys of `override` replace those of `base`; mappings merge, lists do not."""
    inherited = {key.value: value for key, value in base.value}
    own = {key.value for key, _ in override.value}
    merged = [(key, value) for key, value in base.value if key.value not in own]
    for key, value in override.value:  # a key given twice stays twice: decoding reports it
        below = inherited.get(key.value)
        if isinstance(below, MappingNode) and isinstance(value, MappingNode):
            value = merge(below, value)
        merged.append((key, value))
    return MappingNode(override.tag, merged, override.start_mark, override.end_mark)


def decode(cls: type[DataclassT], node: Node) -> DataclassT:
    """Decode a YAML node into the dataclass `cls`, following its type annotations.

    Raises:
        RecipeFileError: every unknown, missing, doubled or wrongly typed key found.
    """
    decoder = _Decoder()
    value = decoder.mapping(cls, node, "")
    if decoder.problems:
        raise RecipeFileError(decoder.problems)
    return typing.cast(DataclassT, value)


class _Decoder:
    """Walks nodes and annotations together, and collects problems instead of stopping."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def mapping(self, cls: type, node: Node, key: str) -> object:
        if not isinstance(node, MappingNode):
            return self._report(
                node, key, f"expected a mapping, got {_got(node)}", "indent its keys below it"
            )
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        found_before = len(self.problems)
        for key_node, value_node in node.value:
            name, path = key_node.value, _join(key, key_node.value)
            if name not in fields:
                self._report(key_node, path, "unknown key", _nearest(name, fields))
            elif name in values:
                self._report(key_node, path, "key given twice", "keep one of the two")
            else:
                values[name] = self._value(hints[name], value_node, path)
        for name, f in fields.items():
            if name not in values and f.default is dataclasses.MISSING:
                self._report(node, _join(key, name), "missing key", _how_to_add(name, hints[name]))
        if len(self.problems) > found_before:
            return None
        value = cls(**values)
        problem = value.problem() if hasattr(value, "problem") else None
        return self._report(node, key, problem, "see recipes/README.md") if problem else value

    def _value(self, hint: Any, node: Node, key: str) -> object:
        origin = typing.get_origin(hint)
        if origin in (Union, types.UnionType):
            return self._optional(hint, node, key)
        if origin is Literal:
            return self._choice(typing.get_args(hint), node, key)
        if origin is tuple:
            return self._list(typing.get_args(hint)[0], node, key)
        if dataclasses.is_dataclass(hint):
            return self.mapping(typing.cast(type, hint), node, key)
        value = _scalar(node, hint)
        if value is None:
            wanted = _SCALARS[hint][1]
            return self._report(
                node, key, f"expected {wanted}, got {_got(node)}", f"write {wanted}"
            )
        return value

    def _optional(self, hint: Any, node: Node, key: str) -> object:
        (inner,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        if isinstance(node, ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            if node.value:
                return None
            return self._report(node, key, "blank value", "write null if that is meant")
        return self._value(inner, node, key)

    def _choice(self, choices: tuple[object, ...], node: Node, key: str) -> object:
        value = _scalar(node, type(choices[0]))
        if value in choices:
            return value
        expected = ", ".join(map(repr, choices))
        return self._report(
            node,
            key,
            f"expected one of {expected}, got {_got(node)}",
            _nearest(getattr(node, "value", ""), choices),
        )

    def _list(self, inner: Any, node: Node, key: str) -> object:
        items = node.value if isinstance(node, SequenceNode) else [node]
        if not items:
            return self._report(node, key, "empty list", "remove the key or fill the list")
        return tuple(self._value(inner, item, f"{key}[{i}]") for i, item in enumerate(items))

    def _report(self, node: Node, key: str, what: str, fix: str) -> object:
        """Collect a problem; returns None, in the place of the value that could not be decoded."""
        mark = node.start_mark
        what = f"{key}: {what}" if key else what
        self.problems.append(Problem(mark.name, mark.line + 1, what, fix))
        return None


def _scalar(node: Node, kind: type) -> object | None:
    """The value of a scalar node of this type, None where it is something else."""
    if not isinstance(node, ScalarNode) or node.tag != _SCALARS[kind][0]:
        return None
    try:
        value: object = yaml.SafeLoader("").construct_object(node)
    except ValueError:  # 0x_, or more digits than Python converts
        return None
    return value


def _one(path: Path, line: int, what: str, fix: str) -> RecipeFileError:
    return RecipeFileError([Problem(str(path), line + 1, what, fix)])


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _got(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return repr(node.value) if node.value else "nothing"
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def _nearest(name: object, choices: typing.Iterable[object]) -> str:
    names = [str(choice) for choice in choices]
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(names)}"


def _how_to_add(name: str, hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"add '{name}:' with one of: {', '.join(map(str, typing.get_args(hint)))}"
    return f"add '{name}:'"
