"""A Python value as the walker of `decode` sees it: an argument, or a recipe as a dict."""

import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from .decode import MisfitError, Tree, nearest
from .errors import short
from .strict_json import is_finite


@dataclass(frozen=True, slots=True)
class PythonValue(Tree):
    """A value of a Python call; None is null, a list is a list, and True is not a number.

    Attributes:
        count: the number of values of a list; anything but a number leaves it open.
        reads: turns text in a notation of its own, such as 1%, into a value.
    """

    value: Any
    count: object = None
    reads: Callable[[str], object] | None = None

    def entries(self) -> Sequence[tuple[str, "PythonValue", "PythonValue"]]:
        """The entries of a dict."""
        value = self._read()
        if not isinstance(value, Mapping):
            raise MisfitError(f"expected a dict, got {short(value)}")
        return [(str(name), self, PythonValue(item)) for name, item in value.items()]

    def items(self) -> Sequence["PythonValue"]:
        """The items of a list; one text or path stands for a list of one."""
        values = [self.value] if isinstance(self.value, str | os.PathLike) else self.value
        if isinstance(values, bytes) or not isinstance(values, Sequence):
            raise MisfitError(f"expected a list or tuple, got {short(self.value)}")
        if isinstance(self.count, int) and len(values) != self.count:
            raise MisfitError(f"expected {self.count} values, got {len(values)}")
        return [PythonValue(item, self.count, self.reads) for item in values]

    def scalar(self, kind: Any) -> object:
        """The value, which must be of one of these kinds."""
        kinds, value = members(kind), self._read()
        refuse_empty(value, kinds)
        if object in kinds or any(_fits(value, each) for each in kinds):
            return Path(value) if are_paths(kinds) else value
        expected = " or ".join(dict.fromkeys(_KINDS.get(each) or each.__name__ for each in kinds))
        raise MisfitError(f"expected {expected}, got {short(self.value)}")

    def choice(self, choices: tuple[object, ...]) -> object:
        """The value, which must be one of these."""
        if any(type(self.value) is type(choice) and self.value == choice for choice in choices):
            return self.value
        what = f"expected one of {', '.join(map(repr, choices))}, got {short(self.value)}"
        raise MisfitError(what, nearest(self.value, choices))

    def is_null(self) -> bool:
        """True for None."""
        return self.value is None

    def _read(self) -> Any:
        reads = self.reads if isinstance(self.value, str) else None
        return reads(self.value) if reads else self.value


_KINDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Path: "a path",
    os.PathLike[str]: "a path",
    Mapping[str, Any]: "a dict",
}


def refuse_empty(value: object, kinds: Sequence[Any]) -> None:
    """Refuse an empty text as a path, though Path takes it for the working folder."""
    if value == "" and (are_paths(kinds) or Path in kinds):
        expected = "a path" if are_paths(kinds) else "a path or a name"
        fix = "give one: an empty text often comes from a variable of the shell that is not set"
        raise MisfitError(f"expected {expected}, got an empty text", fix)


def members(kind: Any) -> tuple[Any, ...]:
    """The kinds of a union, or the one kind that a field has."""
    union = typing.get_origin(kind) in (Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def are_paths(kinds: Sequence[Any]) -> bool:
    """True for a field that is a path and nothing else; the id of a draft on the Hub is not one."""
    return kinds == (Path,) or any(typing.get_origin(kind) is os.PathLike for kind in kinds)


def _fits(value: object, kind: Any) -> bool:
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and is_finite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is Path:
        return isinstance(value, str | os.PathLike)
    return isinstance(value, typing.get_origin(kind) or kind)
