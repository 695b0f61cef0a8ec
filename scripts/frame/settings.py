"""What was given to a verb, as the walker that reads recipes sees it: through either door.

The arguments of a Python call are `_PythonValue`s, the words of a command line `_Words`.
"""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, Union

from ...recipes.decode import Bounds, Misfit, MisfitError, nearest, walk
from ...recipes.errors import DraftQuantError, short
from ...recipes.listener import SILENT, Heard, Listener

# ---- `Option`: what one field of a verb's settings means, and how a command line gives it

Several = Literal["words", "commas", "repeated"]
"""How a command line gives several values: `--x A B`, `--x A,B`, or `--x A --x B`."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a field of `Settings` means, and how a command line gives it: `--num-draft-tokens K`.

    Attributes:
        help: what it means, for Python and the command line alike.
        metavar: what stands for the value in usage; None = the choices, or nothing for a flag.
        short: one letter, such as "-k".
        flag: the option's name, where it is not the field's.
        several: how several values are given.
        count: how many values of `several`, where that is fixed.
        reads: makes a value of a word that is written in a way of its own; raises `MisfitError`.
        example: of a value, for errors.
        bounds: what a number may be.
        fix: of a number out of bounds; by default it is left out or given within them.
    """

    help: str
    metavar: str | None = None
    _: dataclasses.KW_ONLY
    short: str = ""
    flag: str = ""
    several: Several = "words"
    count: int | Literal["+", "?"] = "+"
    reads: Callable[[str], object] | None = None
    example: str = ""
    bounds: Bounds | None = None
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Argument(Option):
    """A field that a command line gives by its place: `DRAFT`."""


class Hidden:
    """A field that belongs to Python alone."""


def spelling(name: str, option: Option) -> str:
    """A field as a command line names it: `--num-draft-tokens`, or `DRAFT`."""
    if isinstance(option, Argument):
        return option.metavar or name.upper()
    return option.flag or f"--{name.replace('_', '-')}"


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


# ---- `Settings` of a verb: its fields are the arguments of a Python function and of a command
#
# A field says once what it means: `Annotated[int | None, Option("tokens drafted per step")] =
# None`.
# The function's signature, its documentation, the parser and `--help` are made from that, and both
# doors are decoded by the walker that reads recipes.


class SettingsError(DraftQuantError):
    """An argument of a Python call is of another kind than its field."""


class CallError(SettingsError, TypeError):
    """A Python call lacks an argument, or has one that its function does not take."""


@dataclass(frozen=True, slots=True)
class Settings(Heard):
    """What a verb is asked to do. Subclasses are frozen dataclasses with annotated fields.

    Attributes:
        listener: sees how far the run is.
    """

    listener: Annotated[Listener, Hidden()] = field(default=SILENT, kw_only=True, repr=False)

    options: ClassVar[Mapping[str, Any]] = {}
    """What fields mean that a record below declares: an `Option`, or an annotation with one."""
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields of which at most one is given."""
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields of which one is given, and no other."""

    def check_bounds(self, called: Callable[[str, Option], str]) -> None:
        """Refuse numbers out of the bounds of their fields.

        Args:
            called: what the user calls a field.

        Raises:
            SettingsError: names the field.
        """
        for name, option in options_of(type(self)).items():
            given = getattr(self, name)
            for number in given if isinstance(given, tuple) else (given,):
                if option.bounds is not None and (problem := option.bounds.problem(number)):
                    fix = option.fix or f"give {option.bounds}, or leave it out"
                    raise SettingsError(called(name, option), problem, fix=fix)

    @classmethod
    def from_arguments(cls, verb: str, arguments: Mapping[str, object]) -> Self:
        """Settings of a Python call.

        Args:
            verb: whose arguments they are, for errors.
            arguments: field -> value.

        Raises:
            SettingsError: a value is of another kind than its field, or does not go with another.
        """
        for names in (*cls.exclusive, *cls.one_of):
            given = [name for name in names if _is_given(arguments.get(name))]
            if len(given) > 1:
                where = f"{verb}({given[1]}=)"
                fix = "leave one of the two out"
                raise SettingsError(where, f"not allowed with {given[0]}", fix=fix)
            if not given and names in cls.one_of:
                what = f"one of {', '.join(names)} is required"
                raise SettingsError(verb, what, fix=f"help(dq.{verb}) explains the arguments")
        settings, misfits = walk(cls, of_python(arguments, options_of(cls)))
        for misfit in misfits:
            where = f"{verb}({misfit.key}=)" if misfit.key else verb
            raise SettingsError(
                where, misfit.what, fix=misfit.fix or f"help(dq.{verb}) explains the arguments"
            )
        settings.check_bounds(lambda name, _: f"{verb}({name}=)")
        settings.check()
        return typing.cast(Self, settings)

    @classmethod
    def from_words(cls, words: Mapping[str, Sequence[str] | bool]) -> Self:
        """Settings of a command line, which `check` has not seen yet.

        Args:
            words: field -> what was given; an option that was not is missing.

        Raises:
            WordsError: a word does not say what its option asks for.
        """
        settings, misfits = walk(cls, of_words(words, options_of(cls)))
        for misfit in misfits:
            raise WordsError(misfit)
        return typing.cast(Self, settings)


def _is_given(value: object) -> bool:
    """A flag that is not set, and no value, are as if the argument were left out."""
    return value is not None and value is not False and value != ()


class WordsError(Exception):
    """A word of a command line is not what its option asks for; the parser makes a `UsageError`."""

    def __init__(self, misfit: "Misfit[Any]") -> None:
        super().__init__(str(misfit))
        self.where = misfit.at.where
        self.what, self.fix = misfit.what, misfit.fix


def options_of(settings: type) -> dict[str, Option]:
    """Field -> what it means, of all that a command line can give; those given by place first."""
    hints = typing.get_type_hints(settings, include_extras=True)
    beside = getattr(settings, "options", {})
    found = {}
    for each in sorted(dataclasses.fields(settings), key=lambda each: bool(each.kw_only)):
        said = beside.get(each.name, hints[each.name])
        option, *_ = getattr(said, "__metadata__", (said,))
        if isinstance(option, Option):
            found[each.name] = option
    return found
