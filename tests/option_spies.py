"""What a command line gives to the function that does the work, seen by a spy in its place.

A `Command` says where it ends, a `Row` what one option is there. Nothing is computed: what lies on
the way is replaced by stubs.
"""

import importlib
import inspect
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Any
from unittest.mock import MagicMock

import pytest
from draftquant.scripts.cli import every_parser, main
from draftquant.scripts.frame.parsers import CommandParser

PACKAGES = ("recipes", "quantize", "calibration", "validate", "scripts")


@dataclass(frozen=True, slots=True)
class Row:
    """One option with a value, and where that value arrives.

    Attributes:
        option: by its longest name, an argument by its metavar.
        words: that are given with it; none for a flag.
        place: of the argument: its name, then attributes, keys and positions with dots between;
            `*` for the keys of a mapping; nothing where it is enough that the spy was reached.
        value: that must be there, and without the option must not.
        spy: the function that gets it, if it is not the command's.
        beside: other words that the option needs.
        without: options of the command line that do not go with it.
    """

    option: str
    words: str
    place: str
    value: object = True
    spy: str = ""
    beside: str = ""
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """A command line that is whole, and what stands in for the rest of the program.

    Attributes:
        line: options that must be given, arguments by their metavars.
        spy: the function behind the command, below `draftquant`.
        stubs: function -> what it returns instead.
    """

    line: str
    spy: str
    rows: tuple[Row, ...]
    stubs: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The words before its arguments and options."""
        return " ".join(
            takewhile(lambda word: word.islower() and word[0] != "-", self.line.split())
        )

    def words(self, row: Row, *, with_option: bool = True) -> list[str]:
        """The command line for a row, with its option and without."""
        words = shlex.split(self.line)
        for name in row.without:
            _leave_out(words, name)
        words += shlex.split(row.beside)
        if not with_option:
            return words
        if not row.option.startswith("-"):
            place = words.index(row.option)
            words[place : place + 1] = shlex.split(row.words)
            return words
        _leave_out(words, row.option)
        return [*words, row.option, *shlex.split(row.words)]


def stubs(*names: str) -> dict[str, object]:
    """Functions that return what nobody looks at, but for `given`: their first argument."""
    return dict.fromkeys(names, _Echo())


class _Echo:
    """A stub that says what it was given."""

    def __call__(self, first: object = None, *_args: object, **_kwargs: object) -> MagicMock:
        return MagicMock(given=first)


class _Reached(BaseException):
    """Ends the run where the spy was called."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _leave_out(words: list[str], option: str) -> None:
    """Take an option and its values out, or an argument."""
    if option not in words:
        return
    first = last = words.index(option)
    while option.startswith("-") and last + 1 < len(words) and not words[last + 1].startswith("--"):
        last += 1
    del words[first : last + 1]


def _home(name: str) -> tuple[Any, str]:
    """The module or class that holds a function, and its name there."""
    where, _, attribute = name.rpartition(".")
    if where.partition(".")[0] in PACKAGES:
        where = f"draftquant.{where}"
    module, _, owner = where.rpartition(".")
    if owner[:1].isupper() or attribute == "run":  # of a class, or of a verb
        return getattr(importlib.import_module(module), owner), attribute
    return importlib.import_module(where), attribute


def arrived(command: Command, row: Row, *, with_option: bool = True) -> Any:
    """What stands where a row says, None where nothing does."""
    words = command.words(row, with_option=with_option)
    return _found(_given(command, row.spy or command.spy, tuple(words)), row.place)


@cache  # many rows are compared with the same command line
def _given(command: Command, spied: str, words: tuple[str, ...]) -> Mapping[str, Any] | None:
    """The arguments with which the spy is called first, None where it is not."""
    home, attribute = _home(spied)
    spy = _Spy(inspect.signature(getattr(home, attribute)))
    with pytest.MonkeyPatch.context() as patch:
        for name, returned in command.stubs.items():
            stub = returned if isinstance(returned, _Echo) else MagicMock(return_value=returned)
            patch.setattr(*_home(name), stub)
        patch.setattr(home, attribute, spy)
        try:
            main(words)
        except _Reached as reached:
            return reached.arguments
        except SystemExit:
            return None
    return None


class _Spy:
    """No function, so that a class does not bind it."""

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature

    def __call__(self, *args: object, **kwargs: object) -> None:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        raise _Reached(bound.arguments)


def _found(arguments: Mapping[str, Any] | None, place: str) -> Any:
    """What stands at a place, None where nothing does."""
    here: Any = arguments
    for step in filter(None, place.split(".")):
        if here is None:
            return None
        if step == "*":
            here = tuple(here)
        elif isinstance(here, Mapping):
            here = here.get(step)
        elif step.isdigit():
            here = here[int(step)] if int(step) < len(here) else None
        else:
            here = getattr(here, step)
    return here if place else arguments is not None


def declared() -> Iterator[tuple[str, str]]:
    """Every command with every argument and option of its own, as the parsers know them."""
    for words, parser in _leaves(every_parser()):
        if parser.form is None:
            continue  # help
        for action in parser._actions:
            if action not in parser.common and action.dest != "json":
                named = max(action.option_strings, key=len, default=str(action.metavar))
                yield " ".join(words), named


def _leaves(
    parser: CommandParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], CommandParser]]:
    if not parser.commands:
        yield words, parser
    for name, below in parser.commands.items():
        yield from _leaves(below, (*words, name))
