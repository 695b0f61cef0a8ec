"""`Settings` of a verb: its fields are the arguments of a Python function and of a command.

A field says once what it means: `Annotated[int | None, Option("tokens drafted per step")] = None`.
The function's signature, its documentation, the parser and `--help` are made from that, and both
doors are decoded by the walker that reads recipes.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from ...recipes.decode import Misfit, walk
from ...recipes.errors import DraftQuantError
from .given import of_python, of_words
from .listener import SILENT, Listener
from .option import Hidden, Option


class SettingsError(DraftQuantError):
    """An argument of a Python call is of another kind than its field."""


class CallError(SettingsError, TypeError):
    """A Python call lacks an argument, or has one that its function does not take."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a verb is asked to do. Subclasses are frozen dataclasses with annotated fields.

    Attributes:
        listener: sees how far the run is.
    """

    listener: Annotated[Listener, Hidden()] = field(default=SILENT, kw_only=True, repr=False)

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields of which at most one is given."""
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields of which one is given, and no other."""

    def check(self) -> None:
        """Refuse settings that do not belong together; there is nothing to refuse by default.

        Raises:
            DraftQuantError: names what does not.
        """

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
    found = {}
    for each in sorted(dataclasses.fields(settings), key=lambda each: bool(each.kw_only)):
        said = getattr(hints[each.name], "__metadata__", ())
        if said and isinstance(said[0], Option):
            found[each.name] = said[0]
    return found
