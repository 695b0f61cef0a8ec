"""Strict JSON: text that must be one object, decoded into frozen dataclasses; maybe hostile."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .decode import MisfitError, walk
from .errors import DraftQuantError, reason

_DEEPEST = 32
_DEEPEST_TEXT = 100  # at this depth no recursion over a parsed value fails
_MOST_VALUES = 2_000_000  # a header of 140,000 tensors has 1.4 million
_LARGEST_NUMBER = 10**40  # far below the largest float: some files write 1e30 for "no limit"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}
_PYTHONS = re.compile(r"(None|True|False)\b")
Pairs = list[tuple[str, Any]]


class JsonProblem(Exception):  # noqa: N818 - not an error of its own: callers turn it into one
    """One thing that is wrong, with its key."""


@contextmanager
def reading(
    path: object, error: type[DraftQuantError], fix: str, before: str = ""
) -> Iterator[None]:
    """Turn the failure to read a file inside the block into an error of its path.

    The same for a file with the wrong content; `before` is put before what is wrong.
    """
    try:
        yield
    except (OSError, JsonProblem) as exc:
        is_read = isinstance(exc, JsonProblem)
        what = f"{before}{exc}" if is_read else f"cannot be read: {reason(exc)}"
        raise error(path, what, fix=fix) from exc


def parse_json(text: str, pairs_hook: Callable[[Pairs], Any] | None = None) -> Any:
    """Parse JSON of bounded size: the result can be copied, written again and printed.

    Args:
        pairs_hook: makes the value of an object; None = a dict, where the last of equal keys wins.

    Raises:
        JsonProblem: not JSON; more than 2,000,000 values or 100 levels; a whole number of more than
            40 digits; a lone surrogate, which no UTF-8 file can hold.
    """
    if text.count(",") + text.count("[") + text.count("{") > _MOST_VALUES:  # before any is made
        raise JsonProblem(f"more than {_MOST_VALUES:,} values")
    try:
        value = json.loads(text, object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as exc:
        raise JsonProblem(f"not JSON: {_plainly(text, exc)}") from exc
    _check_bounds(value)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            surrogate = ascii(exc.object[exc.start])
            raise JsonProblem(f"{surrogate} is half a character (a lone surrogate)") from exc
    return value


def _plainly(text: str, exc: ValueError | RecursionError) -> str:
    """A common slip in plain words with its place, or else what the parser says."""
    slip = _slip(text, exc.pos) if isinstance(exc, json.JSONDecodeError) else None
    if not isinstance(exc, json.JSONDecodeError) or slip is None:
        return str(exc)
    line = f"line {exc.lineno}, " if "\n" in text.strip() else ""  # known for JSON lines
    return f"{slip} ({line}column {exc.colno})"


def _slip(text: str, position: int) -> str | None:
    before, here = text[:position].rstrip(), text[position:]
    closing = here.removeprefix(",").lstrip()[:1]
    if closing in ("}", "]") and (here.startswith(",") or before.endswith(",")):
        return f"there is a comma before the closing {closing}, which JSON does not allow"
    if here.startswith("'"):
        return 'there are single quotes, but JSON needs double quotes (")'
    if word := _PYTHONS.match(here):
        return f"{word[0]} is Python; JSON writes {_OF_PYTHON[word[0]]}"
    return None


def parse_object(text: str) -> dict[str, Any]:
    """Parse text that must be one object in which no key occurs twice."""
    value = parse_json(text, _without_doubles)
    if not isinstance(value, dict):
        raise JsonProblem(f"expected a JSON object, got {_kind(value)}")
    return value


def decode(hint: Any, value: object) -> Any:
    """Build a dataclass, or one of a union; a JsonProblem names the first wrong key."""
    decoded, misfits = walk(hint, _JsonTree(value))
    if misfits:
        raise JsonProblem(str(misfits[0]))
    return decoded


@dataclass(frozen=True, slots=True)
class _JsonTree:
    """A parsed value as the walker sees it. JSON tells 1 from true, which Python does not."""

    value: object

    def entries(self) -> list[tuple[str, "_JsonTree", "_JsonTree"]]:
        if not isinstance(self.value, dict):
            raise MisfitError(f"expected an object, got {_kind(self.value)}")
        return [(name, self, _JsonTree(item)) for name, item in self.value.items()]

    def items(self) -> "Sequence[_JsonTree]":
        if not isinstance(self.value, list):
            raise MisfitError(f"expected a list, got {_kind(self.value)}")
        return [_JsonTree(item) for item in self.value]

    def all_of(self, kind: Any) -> tuple[object, ...] | None:
        if not isinstance(self.value, list) or kind not in (int, float):
            return None
        types = set(map(type, self.value))
        fits = types <= ({int} if kind is int else {int, float})
        finite = kind is int or (fits and all(map(is_finite, self.value)))
        return tuple(self.value) if fits and finite else None

    def scalar(self, kind: Any) -> object:
        if kind is object:
            _check_plain(self.value, _DEEPEST)
        elif kind is float:
            if type(self.value) not in (int, float) or not is_finite(self.value):
                raise MisfitError(f"expected a finite number, got {_kind(self.value)}")
        elif type(self.value) is not kind:
            raise MisfitError(f"expected {kind.__name__}, got {_kind(self.value)}")
        return self.value

    def choice(self, choices: tuple[object, ...]) -> object:
        if any(type(self.value) is type(choice) and self.value == choice for choice in choices):
            return self.value
        expected = " or ".join(map(repr, choices))
        raise MisfitError(f"expected {expected}, got {_kind(self.value)}")

    def is_null(self) -> bool:
        return self.value is None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    decoded: dict[str, Any] = {}
    for name, value in pairs:
        if name in decoded:
            raise ValueError(f"key {name!r} given twice")
        decoded[name] = value
    return decoded


def _check_bounds(value: object) -> None:
    """Check level by level: not too deep, and no number that no float comes near."""
    level = [value]
    for _ in range(_DEEPEST_TEXT):
        if any(type(item) is int and abs(item) > _LARGEST_NUMBER for item in level):
            raise JsonProblem("a whole number of more than 40 digits")
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise JsonProblem(f"nested more than {_DEEPEST_TEXT} levels deep")


def _check_plain(value: object, levels: int) -> None:
    """Refuse what JSON cannot express (NaN), and what cannot be written again."""
    if not levels:
        raise MisfitError(f"nested more than {_DEEPEST} levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise MisfitError(f"expected finite numbers, got {value}")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(item, levels - 1)


def is_finite(number: Any) -> bool:
    """Whether it is finite as a float."""
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        return False


def _kind(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
