"""`Option`: what one field of a verb's settings means, and how a command line gives it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...recipes.bounds import Bounds

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
