"""Strict decoding of JSON into frozen dataclasses: unknown, missing and mistyped keys are errors.

It knows a schema only through its type annotations: str, int, Literal, X | None, tuple[X, ...] and
nested dataclasses. What values mean together is checked by the schema's own module.
"""

import dataclasses
import json
import types
import typing
from typing import Any, Literal, TypeVar, Union

DataclassT = TypeVar("DataclassT")


class JsonProblem(Exception):  # noqa: N818 - not an error of its own: callers turn it into one
    """One thing wrong, with the key it stands at ("" = the whole document)."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key}: {what}" if key else what)


def parse_object(text: str) -> dict[str, Any]:
    """Parse text that must be one JSON object without doubled keys.

    Raises:
        JsonProblem: not JSON, not an object, or a key stands twice in one object.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as exc:
        raise JsonProblem("", f"not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise JsonProblem("", f"expected a JSON object, got {_kind(value)}")
    return value


def decode(cls: type[DataclassT], value: object, key: str = "") -> DataclassT:
    """Build the dataclass `cls` from a parsed JSON object.

    Raises:
        JsonProblem: the first key that is unknown, missing or of another type than annotated.
    """
    if not isinstance(value, dict):
        raise JsonProblem(key, f"expected an object, got {_kind(value)}")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(typing.cast(Any, cls))]
    for name in value:
        if name not in names:
            raise JsonProblem(_join(key, name), "unknown key")
    for name in names:
        if name not in value:
            raise JsonProblem(_join(key, name), "missing key")
    return cls(**{name: _decode(hints[name], value[name], _join(key, name)) for name in names})


def _decode(hint: Any, value: object, key: str) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        return None if value is None else _decode(inner, value, key)
    if origin is Literal:
        # JSON true equals 1 in Python: the type has to agree as well.
        if any(type(value) is type(choice) and value == choice for choice in arguments):
            return value
        expected = " or ".join(map(repr, arguments))
        raise JsonProblem(key, f"expected {expected}, got {_kind(value)}")
    if origin is tuple:
        if not isinstance(value, list):
            raise JsonProblem(key, f"expected a list, got {_kind(value)}")
        return tuple(_decode(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(type, hint), value, key)
    if type(value) is not hint:
        raise JsonProblem(key, f"expected {hint.__name__}, got {_kind(value)}")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {name!r} given twice")
        found[name] = value
    return found


def _kind(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
