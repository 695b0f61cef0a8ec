"""`Settings` of a verb: its fields are the arguments of a Python function and of a command.

A field says once what it means: `Annotated[int | None, Option("tokens drafted per step")] = None`.
The function's signature, its documentation, the parser and `--help` are made from that, and both
doors are decoded by the walker that reads recipes.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from ...recipes.decode import Bounds, Misfit, MisfitError, nearest, walk
from ...recipes.errors import DraftQuantError, short
from ...recipes.listener import SILENT, Heard, Listener
from ...recipes.python_values import PythonValue, are_paths, members, refuse_empty

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


@dataclass(frozen=True, slots=True)
class _Given:
    """All that was given, as the walker sees it: the fields of settings and nothing else."""

    fields: Mapping[str, "PythonValue | _Words"]
    where: str = ""

    def entries(self) -> Sequence[tuple[str, Any, Any]]:
        return [(name, value, value) for name, value in self.fields.items()]

    def items(self) -> Sequence[Any]:
        raise MisfitError("expected arguments")

    def all_of(self, kind: Any) -> tuple[object, ...] | None:
        raise MisfitError(f"expected arguments, not {kind}")

    scalar = choice = all_of

    def is_null(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Words:
    """What a command line gives for the option of a field; True for a flag."""

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
        refuse_empty(self._word, kinds)
        if are_paths(kinds):
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

    def _read(self, word: str) -> PythonValue:
        assert self.option.reads is not None
        return PythonValue(self.option.reads(word), self.option.count, self.option.reads)


class SettingsError(DraftQuantError):
    """An argument of a Python call is of another kind than its field, or out of its bounds."""


class CallError(SettingsError, TypeError):
    """A Python call lacks an argument, or has one that its function does not take."""


class WordsError(Exception):
    """A word of a command line is not what its option asks for; the parser makes a `UsageError`."""

    def __init__(self, misfit: "Misfit[Any]") -> None:
        super().__init__(str(misfit))
        self.where = misfit.at.where
        self.what, self.fix = misfit.what, misfit.fix


@dataclass(frozen=True, slots=True)
class Settings(Heard):
    """What a verb is asked to do. Subclasses are frozen dataclasses with annotated fields."""

    listener: Annotated[Listener, Hidden()] = field(default=SILENT, kw_only=True, repr=False)

    options: ClassVar[Mapping[str, Any]] = {}
    """What fields mean that a record below declares: an `Option`, or an annotation with one."""
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields of which at most one is given."""
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields of which one is given, and no other."""

    def check_bounds(self, called: Callable[[str, Option], str]) -> None:
        """Refuse numbers out of the bounds of their fields, by what the user calls a field."""
        for name, option in options_of(type(self)).items():
            given = getattr(self, name)
            for number in given if isinstance(given, tuple) else (given,):
                if option.bounds is not None and (problem := option.bounds.problem(number)):
                    fix = option.fix or f"give {option.bounds}, or leave it out"
                    raise SettingsError(called(name, option), problem, fix=fix)

    @classmethod
    def from_arguments(cls, verb: str, arguments: Mapping[str, object]) -> Self:
        """Settings of a Python call: field -> value; errors name `verb`."""
        explained = f"help(dq.{verb}) explains the arguments"
        for names in (*cls.exclusive, *cls.one_of):
            given = [name for name in names if arguments.get(name) not in (None, False, ())]
            if len(given) > 1:
                what, fix = f"not allowed with {given[0]}", "leave one of the two out"
                raise SettingsError(f"{verb}({given[1]}=)", what, fix=fix)
            if not given and names in cls.one_of:
                raise SettingsError(verb, f"one of {', '.join(names)} is required", fix=explained)
        options = options_of(cls)
        values = {
            name: PythonValue(value, options[name].count, options[name].reads)
            if name in options
            else PythonValue(value)
            for name, value in arguments.items()
        }
        settings, misfits = walk(cls, _Given(values))
        for misfit in misfits:
            where = f"{verb}({misfit.key}=)" if misfit.key else verb
            raise SettingsError(where, misfit.what, fix=misfit.fix or explained)
        settings.check_bounds(lambda name, _: f"{verb}({name}=)")
        settings.check()
        return typing.cast(Self, settings)

    @classmethod
    def from_words(cls, words: Mapping[str, Sequence[str] | bool]) -> Self:
        """Settings of a command line, field -> what was given; `check` has not seen them yet.

        Raises:
            WordsError: a word does not say what its option asks for.
        """
        options = options_of(cls)
        given = {name: _Words(options[name], name, word) for name, word in words.items()}
        settings, misfits = walk(cls, _Given(given))
        for misfit in misfits:
            raise WordsError(misfit)
        return typing.cast(Self, settings)


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
