"""What was given to a verb, as the walker that reads recipes sees it: through either door.

The arguments of a Python call are `_PythonValue`s, the words of a command line `_Words`.
"""

import math
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from ...recipes.decode import MisfitError, nearest
from ...recipes.errors import short
from .option import Option, spelling


def of_python(arguments: Mapping[str, object], options: Mapping[str, Option]) -> "_Given":
    """The arguments of a call, by the names of their fields."""
    return _Given({n: _PythonValue(value, options.get(n)) for n, value in arguments.items()})


def of_value(value: object) -> "_PythonValue":
    """A value that has keys of its own, such as a recipe as a dict."""
    return _PythonValue(value)


def of_words(words: Mapping[str, Sequence[str] | bool], options: Mapping[str, Option]) -> "_Given":
    """The words behind each option of a command line; True for a flag."""
    return _Given({name: _Words(options[name], name, word) for name, word in words.items()})


@dataclass(frozen=True, slots=True)
class _Given:
    """All that was given, as the walker sees it."""

    fields: Mapping[str, "_PythonValue | _Words"]
    where: str = ""

    def entries(self) -> Sequence[tuple[str, Any, Any]]:
        return [(name, value, value) for name, value in self.fields.items()]

    def items(self) -> Sequence[Any]:
        raise MisfitError("expected arguments")

    def all_of(self, kind: Any) -> tuple[object, ...] | None:
        raise MisfitError(f"expected arguments, not {kind}")

    def scalar(self, kind: Any) -> object:
        raise MisfitError(f"expected arguments, not {kind}")

    def choice(self, choices: tuple[object, ...]) -> object:
        raise MisfitError(f"expected arguments, not one of {choices}")

    def is_null(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _PythonValue:
    """A value of a Python call; None is null, a list is a list, and True is no number.

    Text that a command line reads in a way of its own, such as 1%, is read so here too.
    """

    value: Any
    option: Option | None = None

    def entries(self) -> Sequence[tuple[str, "_PythonValue", "_PythonValue"]]:
        value = self._read()
        if not isinstance(value, Mapping):
            raise MisfitError(f"expected a dict, got {_shown(value)}")
        return [(str(name), self, _PythonValue(item)) for name, item in value.items()]

    def items(self) -> Sequence["_PythonValue"]:
        """Of a list; one text or path stands for a list of one."""
        values = [self.value] if isinstance(self.value, str | os.PathLike) else self.value
        if isinstance(values, bytes) or not isinstance(values, Sequence):
            raise MisfitError(f"expected a list or tuple, got {_shown(self.value)}")
        count = self.option.count if self.option else None
        if isinstance(count, int) and len(values) != count:
            raise MisfitError(f"expected {count} values, got {len(values)}")
        return [_PythonValue(item, self.option) for item in values]

    def all_of(self, kind: Any) -> tuple[object, ...] | None:
        del kind
        return None

    def scalar(self, kind: Any) -> object:
        kinds, value = members(kind), self._read()
        _refuse_empty(value, kinds)
        if object in kinds or any(_fits(value, one) for one in kinds):
            return Path(value) if _are_paths(kinds) else value
        expected = " or ".join(dict.fromkeys(_KINDS.get(one) or one.__name__ for one in kinds))
        raise MisfitError(f"expected {expected}, got {_shown(self.value)}")

    def choice(self, choices: tuple[object, ...]) -> object:
        if any(type(self.value) is type(one) and self.value == one for one in choices):
            return self.value
        listed = ", ".join(map(repr, choices))
        raise MisfitError(
            f"expected one of {listed}, got {_shown(self.value)}", nearest(self.value, choices)
        )

    def is_null(self) -> bool:
        return self.value is None

    def _read(self) -> Any:
        reads = self.option.reads if self.option else None
        return reads(self.value) if reads and isinstance(self.value, str) else self.value


_KINDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Path: "a path",
    os.PathLike[str]: "a path",
    Mapping[str, Any]: "a dict",
}


def _refuse_empty(value: object, kinds: Sequence[Any]) -> None:
    """An empty text is no path, though Path takes it for the working folder."""
    if value == "" and (_are_paths(kinds) or Path in kinds):
        expected = "a path" if _are_paths(kinds) else "a path or a name"
        fix = "give one: an empty text often comes from a variable of the shell that is not set"
        raise MisfitError(f"expected {expected}, got an empty text", fix)


def members(kind: Any) -> tuple[Any, ...]:
    """The kinds of a union, or the one kind that a field has."""
    union = typing.get_origin(kind) in (Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def _are_paths(kinds: Sequence[Any]) -> bool:
    """A field that is a path and nothing else; the id of a draft on the Hub is none."""
    return kinds == (Path,) or any(typing.get_origin(one) is os.PathLike for one in kinds)


def _fits(value: object, kind: Any) -> bool:
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(typing.cast(float, value))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is Path:
        return isinstance(value, str | os.PathLike)
    return isinstance(value, typing.get_origin(kind) or kind)


def _shown(value: object) -> str:
    return short(repr(value)) if not isinstance(value, str) else short(value)


@dataclass(frozen=True, slots=True)
class _Words:
    """What a command line gives for one option; True for a flag.

    Attributes:
        name: of the field.
    """

    option: Option
    name: str
    words: Sequence[str] | bool

    @property
    def where(self) -> str:
        """What a user calls it."""
        return spelling(self.name, self.option)

    @property
    def _word(self) -> str:
        assert not isinstance(self.words, bool)
        return self.words[-1]

    def entries(self) -> Sequence[tuple[str, Any, Any]]:
        read = [self._read(word) for word in self._each()]
        return [entry for each in read for entry in each.entries()]

    def items(self) -> Sequence[Any]:
        return [_Words(self.option, self.name, (word,)) for word in self._each()]

    def all_of(self, kind: Any) -> tuple[object, ...] | None:
        if kind is not int or self.option.several != "commas":
            return None
        try:
            return tuple(int(word) for word in self._each())
        except ValueError as exc:
            raise MisfitError(
                f"expected whole numbers with commas between, got {self._word!r}"
            ) from exc

    def scalar(self, kind: Any) -> object:
        if isinstance(self.words, bool):
            return self.words
        kinds = members(kind)
        if self.option.reads is not None:
            return self._read(self._word).scalar(kind)
        _refuse_empty(self._word, kinds)
        if _are_paths(kinds):
            return Path(self._word)
        if kinds == (int,) or kinds == (float,):
            return self._number(kinds[0])
        return self._word

    def choice(self, choices: tuple[object, ...]) -> object:
        named = {str(one): one for one in choices}
        if self._word in named:
            return named[self._word]
        fix = nearest(self._word.lower(), choices)
        raise MisfitError(
            f"expected one of {', '.join(named)}, got {short(self._word)}",
            fix.replace("'", "") if fix.startswith("did") else "",
        )

    def is_null(self) -> bool:
        return False

    def _each(self) -> Iterator[str]:
        assert not isinstance(self.words, bool)
        for word in self.words:
            yield from word.split(",") if self.option.several == "commas" else (word,)

    def _number(self, kind: type[int] | type[float]) -> float:
        noun, example = ("a whole number", "4") if kind is int else ("a number", "0.5")
        try:
            number = kind(self._word)
        except ValueError as exc:
            fix = f"for example {self.where} {self.option.example or example}"
            raise MisfitError(f"expected {noun}, got {short(self._word)}", fix) from exc
        return number

    def _read(self, word: str) -> _PythonValue:
        assert self.option.reads is not None
        return _PythonValue(self.option.reads(word), self.option)
