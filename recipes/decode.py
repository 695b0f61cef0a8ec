"""Strict decoding: a document and the annotations of frozen dataclasses, walked together.

The walker sees a document as a `Tree`: YAML nodes (`library.py`), JSON values (`strict_json.py`), a
command line or the arguments of a Python call. Each says in its own words what a value should have
been. It knows a schema only through its annotations: scalars, Literal, X | None, tuple[X, ...]
and Sequence[X], Mapping[str, X] and Mapping[int, X], dataclasses, unions of dataclasses that the
Literal in their first field tells apart, and unions of scalars, which the tree tells apart.
`Annotated[X, rule]` holds X to a rule: `Annotated[int, AT_LEAST_1]`, `Annotated[str, HEX_64]`.

A key may be left out where its field has a default, unless it is a constant (a Literal of one
value): a format and its version always stand there.
"""

import collections.abc
import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Protocol, Self, TypeVar, Union

from .errors import DraftQuantError, short


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A range: from a smallest number, or above one, to a largest, or below one; never infinity."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            abs(value) < math.inf
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.most is None and self.below is None:
            return f"at least {self.least}" if self.above is None else f"more than {self.above}"
        if type(self.least) is type(self.most) is int:
            return f"{self.least:,} to {self.most:,}"
        low = f"[{self.least}" if self.above is None else f"({self.above}"
        high = f"{self.most}]" if self.below is None else f"{self.below})"
        return f"a share in {low}, {high}"

    def problem(self, value: float | None) -> str:
        """What is wrong with a number, as expected and got; empty if nothing is, or for None."""
        return "" if value is None or value in self else f"expected {self}, got {value}"

    def check(
        self, error: type[DraftQuantError], where: str, value: float | None, *, fix: str
    ) -> None:
        """Refuse a number out of bounds with an error of this type; None passes."""
        if problem := self.problem(value):
            raise error(where, problem, fix=fix)


@dataclass(frozen=True, slots=True)
class Spelled:
    """Text that a regular expression matches as a whole; `words` says what it is."""

    pattern: str
    words: str

    def problem(self, value: str | tuple[str, ...] | None) -> str:
        """What is wrong with a text, or with one of several."""
        if isinstance(value, tuple):
            fits = all(re.fullmatch(self.pattern, text) for text in value)
            return "" if fits else f"expected {self.words} each"
        fits = value is None or re.fullmatch(self.pattern, value) is not None
        return "" if fits else f"expected {self.words}, got {short(value)}"


AT_LEAST_0, AT_LEAST_1, AT_LEAST_2 = (Bounds(least=number) for number in range(3))
ABOVE_0 = Bounds(above=0)
SHARE = Bounds(above=0, below=1)
SHARE_OR_ALL = Bounds(above=0, most=1)
CONFIDENCE = Bounds(above=0.5, below=1)
"""The bounds of the confidence of a one-sided bound."""
HEX_64 = Spelled("[0-9a-f]{64}", "64 hex digits")
"""A sha256."""


class MisfitError(Exception):
    """A value is not of the kind that the schema wants; the walker turns this into a `Misfit`."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


class Tree(Protocol):
    """One value of a document. Every method raises `MisfitError` where it is something else."""

    def entries(self) -> Sequence[tuple[str, Self, Self]]:
        """The entries of a mapping: name, the key itself (for its place), value."""

    def items(self) -> Sequence[Self]:
        """The items of a list."""

    def all_of(self, kind: Any) -> tuple[object, ...] | None:
        """The items of a list of scalars of this kind, if that is quick to see, else None."""
        del kind
        return None

    def scalar(self, kind: Any) -> object:
        """The scalar of this type, one that this kind of document has."""

    def choice(self, choices: tuple[object, ...]) -> object:
        """One of these scalars."""

    def is_null(self) -> bool:
        """True if the value is null."""


TreeT = TypeVar("TreeT", bound=Tree)
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Misfit(Generic[TreeT]):
    """One thing that is wrong at a value or key; no fix where a rule of the schema is broken."""

    at: TreeT
    key: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" if self.key else self.what


def walk(hint: Any, tree: TreeT) -> tuple[Any, list[Misfit[TreeT]]]:
    """What `hint` describes, a dataclass or a union of them, or None, and all misfits."""
    walker: _Walker[TreeT] = _Walker()
    value = walker.value(hint, tree, "")
    return value, walker.misfits


def encode(value: object) -> Any:
    """The plain data that `value` is decoded from, without keys that only repeat their default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        pairs = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {
            f.name: encode(item)
            for f, item in pairs
            if not _may_be_left_out(f, hints[f.name]) or item != _default(f)
        }
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        plain = set(map(type, value)) <= {int, float}
        return list(value) if plain else [encode(item) for item in value]
    return value


def problem_of(record: object) -> str | None:
    """The first rule that a record, which was not decoded, or one inside it breaks, or None."""
    return next(_broken(type(record), record, ""), None)


class _Walker(Generic[TreeT]):
    def __init__(self) -> None:
        self.misfits: list[Misfit[TreeT]] = []

    def value(self, hint: Any, tree: TreeT, key: str) -> Any:
        """What `hint` describes; where that is not there, None, and one more misfit."""
        try:
            return self._value(hint, tree, key)
        except MisfitError as exc:
            return self._report(tree, key, exc.what, exc.fix)

    def _value(self, hint: Any, tree: TreeT, key: str) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (Union, types.UnionType):
            kinds = [kind for kind in arguments if kind is not type(None)]
            if len(kinds) < len(arguments) and tree.is_null():
                return None
            if len(kinds) > 1 and not all(map(dataclasses.is_dataclass, kinds)):
                return tree.scalar(Union[tuple(kinds)])  # noqa: UP007 (of what is known at run time)
            if len(kinds) > 1:
                return self._told_apart(kinds, tree, key)
            return self._value(kinds[0], tree, key)
        if origin is Annotated:
            value = self._value(arguments[0], tree, key)
            if problem := _problem(hint, value):
                raise MisfitError(problem)
            return value
        if origin is Literal:
            return tree.choice(arguments)
        if origin in (tuple, collections.abc.Sequence):
            known = tree.all_of(_bare(arguments[0]))  # lists of tokens are long
            if known is not None and not any(_problem(arguments[0], item) for item in known):
                return known
            items = enumerate(tree.items())
            return tuple(self.value(arguments[0], item, f"{key}[{i}]") for i, item in items)
        if origin is collections.abc.Mapping:
            kind, item_hint = arguments
            return {
                self._key(kind, name, at, key): self.value(item_hint, item, _join(key, name))
                for name, at, item in tree.entries()
            }
        if dataclasses.is_dataclass(hint):
            return self._record(typing.cast(type, hint), tree, key)
        return tree.scalar(hint)

    def _record(self, cls: type, tree: TreeT, key: str) -> Any:
        hints = _hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        given: dict[str, TreeT] = {}
        found_before = len(self.misfits)
        for name, at, item in tree.entries():
            if name not in fields:
                self._report(at, _join(key, name), "unknown key", nearest(name, fields))
            elif name in given:
                self._report(at, _join(key, name), "key given twice", "keep one of the two")
            else:
                given[name] = item
        for name, f in fields.items():
            if name not in given and not _may_be_left_out(f, hints[name]):
                self._report(tree, _join(key, name), "missing key", _how_to_add(name, hints[name]))
        there = (name for name in fields if name in given)
        values = {n: self.value(hints[n], given[n], _join(key, n)) for n in there}
        if len(self.misfits) > found_before:
            return None
        value = cls(**values)
        problem = value.problem() if hasattr(value, "problem") else None
        return self._report(tree, key, problem, "") if problem else value

    def _key(self, kind: type, name: str, at: TreeT, key: str) -> object:
        """A key of a mapping: as it is written, or as the whole number that it spells."""
        if kind is not int:
            return name
        if _WHOLE.fullmatch(name):
            return int(name)
        self._report(at, _join(key, name), "expected a whole number as the key", "")
        return None

    def _told_apart(self, kinds: Sequence[type], tree: TreeT, key: str) -> Any:
        """The one of several dataclasses whose constant is in the first field."""
        tag = dataclasses.fields(kinds[0])[0].name
        by_tag: dict[object, type] = {typing.get_args(_hints(kind)[tag])[0]: kind for kind in kinds}
        for name, _, item in tree.entries():
            if name == tag:
                try:
                    return self._record(by_tag[item.choice(tuple(by_tag))], tree, key)
                except MisfitError as exc:
                    return self._report(item, _join(key, tag), exc.what, exc.fix)
        return self._report(tree, _join(key, tag), "missing key", f"add '{tag}:'")

    def _report(self, at: TreeT, key: str, what: str, fix: str) -> None:
        """Collect a misfit, and return None instead of the value that could not be decoded."""
        self.misfits.append(Misfit(at, key, what, fix))


def nearest(name: object, choices: Iterable[object]) -> str:
    """What was probably meant, or else what the choices are."""
    names = [str(choice) for choice in choices]
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(names)}"


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    """Field -> what it holds; computed once per class, however many values a document has."""
    return typing.get_type_hints(cls, include_extras=True)


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _problem(hint: Any, value: object) -> str:
    if value is None or typing.get_origin(hint) is not Annotated:
        return ""
    rules = (rule for rule in typing.get_args(hint)[1:] if isinstance(rule, Bounds | Spelled))
    return next(filter(None, (rule.problem(value) for rule in rules)), "")  # type: ignore[arg-type]


def _broken(hint: Any, value: object, key: str) -> Iterator[str]:
    """The rules that a value breaks, or the records, lists and mappings inside it."""
    if problem := _problem(hint, value):
        yield f"{key}: {problem}"
    inner = typing.get_args(_bare(hint))
    if types.NoneType in inner:
        yield from _broken(inner[0], value, key)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, field_hint in _hints(type(value)).items():
            yield from _broken(field_hint, getattr(value, name), _join(key, name))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _broken(inner[1], item, _join(key, str(name)))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _broken(inner[0], item, f"{key}[{i}]")


def _may_be_left_out(f: "dataclasses.Field[Any]", hint: Any) -> bool:
    hint = _bare(hint)
    constant = typing.get_origin(hint) is Literal and len(typing.get_args(hint)) == 1
    has_default = not (f.default is f.default_factory is dataclasses.MISSING)
    return has_default and not constant


def _default(f: "dataclasses.Field[Any]") -> object:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _how_to_add(name: str, hint: Any) -> str:
    hint = _bare(hint)
    if typing.get_origin(hint) is Literal:
        return f"add '{name}:' with one of: {', '.join(map(str, typing.get_args(hint)))}"
    return f"add '{name}:'"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
