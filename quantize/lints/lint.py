"""One finding, and the changes of config.json that findings ask for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..drafts import Draft

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


Check = Callable[[Draft], Iterator[Lint]]
"""Looks at one draft for one kind of finding."""


def config_changes(lints: Iterable[Lint]) -> dict[str, Any]:
    """All fixes together: dotted key -> value. No two lints touch one key."""
    changes: dict[str, Any] = {}
    for lint in lints:
        assert not changes.keys() & lint.fix.keys(), f"{lint.name}: {lint.fix} against {changes}"
        changes |= lint.fix
    return changes


def fixed_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with changes applied; keys keep their order, `config` stays as it is."""
    fixed = dict(config)
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = fixed
        for section in sections:
            place[section] = dict(place.get(section) or {})
            place = place[section]
        place[key] = value
    return fixed
