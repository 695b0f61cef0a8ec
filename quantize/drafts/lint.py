"""One finding about a draft that is otherwise well-formed; families have lints of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """Something that may cost acceptance, or bytes, although the draft is well-formed.

    Attributes:
        name: stable, in lower case with hyphens.
        level: "warning" where acceptance or loading is at stake, "note" for advice.
        cause: what is there, and who reads it how.
        remedy: what to do about it.
        fix: dotted config.json key -> the value that settles it; empty where only the user knows.
            A fix changes what engines read, never what this package computes for the draft.
    """

    name: str
    level: Level
    cause: str
    remedy: str
    fix: Mapping[str, Any] = field(default_factory=dict)
