"""Typed reading of a draft's config.json: each key checked once, errors that name file and key."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...recipes.errors import short
from ..errors import CheckpointError
from .config_keys import misspelling_of

_REQUIRED = object()
Served = Mapping[str, tuple[Any, str]]
"""Config key -> the value that a family's maths is for, and what another one means."""


def with_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a multimodal target's text_config beside its own, which go first."""
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, Mapping) else config


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Reads keys of one JSON object. `where` is named in errors."""

    config: Mapping[str, Any]
    where: object

    def positive(self, key: str, default: Any = _REQUIRED) -> int:
        """A whole number of at least 1; a missing or null key gives `default`."""
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            raise self._wrong(key, "a positive whole number", value)
        return value

    def even(self, key: str) -> int:
        """An even number of rotated dimensions, which turn in pairs."""
        value = self.positive(key)
        if value % 2:
            raise CheckpointError(
                self.where,
                f"{key}: expected an even number, got {value}: dimensions are rotated in pairs",
                fix=f"correct {key!r}",
            )
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite positive number; a missing or null key gives `default`."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self._wrong(key, "a positive number", value)
        return float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """True or false; a missing or null key gives `default`."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false", value)
        return value

    def section(self, key: str) -> "ConfigReader":
        """A nested object; a missing or null key gives an empty one."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return ConfigReader(value, f"{self.where}: {key}")

    def layer_ids(self, key: str) -> tuple[int, ...] | None:
        """A list of distinct layer numbers in ascending order; None where the key is missing."""
        value = self._get(key, None)
        if value is None:
            return None
        good = isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value)
        if not good or sorted(set(value)) != value:
            raise self._wrong(key, "distinct layer numbers in ascending order", value)
        return tuple(value)

    def refuse_others(self, served: Served) -> None:
        """Refuse what would be other maths than that of the family; a missing key is the family's.

        Raises:
            CheckpointError: a key has another value than the one that is served.
        """
        for key, (expected, meaning) in served.items():
            got = self.config.get(key)
            if got is None or (
                got == expected and isinstance(got, bool) == isinstance(expected, bool)
            ):
                continue
            raise CheckpointError(
                self.where,
                f"{key}: expected {expected!r}, got {short(got)}: {meaning}",
                fix="such a draft cannot be quantized or replayed: no family has these maths",
            )

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            near = misspelling_of(key, self.config)
            add = f"add {key!r} as the draft was trained with it"
            raise CheckpointError(
                self.where,
                f"{key}: missing key",
                fix=f"rename {near!r} to {key!r}" if near else add,
            )
        return default

    def _wrong(self, key: str, expected: str, got: Any) -> CheckpointError:
        return CheckpointError(
            self.where, f"{key}: expected {expected}, got {short(got)}", fix=f"correct {key!r}"
        )
