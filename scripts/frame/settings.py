"""`Form` of a verb: a record, whose fields are the arguments of a Python function and of a command.

The walker that reads recipes decodes both.
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...recipes.decode import Misfit, MisfitError, nearest, walk
from ...recipes.errors import SettingsError, short
from ...recipes.listener import Heard
from ...recipes.python_values import PythonValue, are_paths, members, refuse_empty
from .arguments import Option

S = TypeVar("S", bound=Heard)


@dataclass(frozen=True, slots=True)
class _Given:
    """All given arguments, as the walker sees them: only fields of settings."""

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
        return self.option.spelling(self.name)

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
        named = {str(choice): choice for choice in choices}
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
            fix = f"for example {self.where} {example}"
            raise MisfitError(f"expected {noun}, got {short(self._word)}", fix) from exc
        return number

    def _read(self, word: str) -> PythonValue:
        assert self.option.reads is not None
        return PythonValue(self.option.reads(word), self.option.count, self.option.reads)


class CallError(SettingsError, TypeError):
    """A Python call lacks an argument, or has one that its function does not take."""


class WordsError(Exception):
    """A word of a command line does not fit its option; the parser raises a `UsageError`."""

    def __init__(self, misfit: "Misfit[Any]") -> None:
        super().__init__(str(misfit))
        self.where = misfit.at.where
        self.what, self.fix = misfit.what, misfit.fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(Generic[S]):
    """The settings of a verb: a record, and what its fields mean.

    Attributes:
        verb: its name in Python: `parity_run_tasks`.
        exclusive: fields of which at most one may be given.
        one_of: fields of which exactly one must be given.
    """

    verb: str
    record: type[S]
    options: Mapping[str, Option]
    exclusive: Sequence[str] = ()
    one_of: Sequence[str] = ()

    def from_arguments(self, arguments: Mapping[str, object]) -> S:
        """The record of a Python call: field -> value; errors name the verb."""
        explained = f"help(dq.{self.verb}) explains the arguments"
        for names in filter(None, (self.exclusive, self.one_of)):
            given = [
                n for n in names if (v := arguments.get(n)) not in (None, ()) and v is not False
            ]
            if len(given) > 1:
                what, fix = f"not allowed with {given[0]}", "leave one of the two out"
                raise SettingsError(f"{self.verb}({given[1]}=)", what, fix=fix)
            if not given and names == self.one_of:
                what = f"one of {', '.join(names)} is required"
                raise SettingsError(self.verb, what, fix=explained)
        values = {name: self._value(name, value) for name, value in arguments.items()}
        settings, misfits = walk(self.record, _Given(values))
        for misfit in misfits:
            where = f"{self.verb}({misfit.key}=)" if misfit.key else self.verb
            raise SettingsError(where, misfit.what, fix=misfit.fix or explained)
        self.check(settings, lambda name, _: f"{self.verb}({name}=)")
        return typing.cast(S, settings)

    def _value(self, name: str, value: object) -> PythonValue:
        option = self.options.get(name)
        return PythonValue(value, option.count, option.reads) if option else PythonValue(value)

    def from_words(self, words: Mapping[str, Sequence[str] | bool]) -> S:
        """The record of a command line, from field -> words; it is not checked yet.

        Raises:
            WordsError: a word does not fit its option.
        """
        given = {name: _Words(self.options[name], name, word) for name, word in words.items()}
        settings, misfits = walk(self.record, _Given(given))
        for misfit in misfits:
            raise WordsError(misfit)
        return typing.cast(S, settings)

    def in_call(self, where: str) -> str:
        """The place of an error in a Python call: `--tp` of `check` is `check(tp=)`."""
        option, space, behind = where.partition(" ")
        names = {each.spelling(name): name for name, each in self.options.items()}
        return f"{self.verb}({names[option]}=){space}{behind}" if option in names else where

    def check(self, settings: S, called: Callable[[str, Option], str]) -> None:
        """Refuse numbers outside the bounds of their fields, then contradictory settings."""
        for name, option in self.options.items():
            given = getattr(settings, name)
            for number in given if isinstance(given, tuple) else (given,):
                if option.bounds is not None and (problem := option.bounds.problem(number)):
                    fix = option.fix or f"give {option.bounds}, or leave it out"
                    raise SettingsError(called(name, option), problem, fix=fix)
        settings.check()
