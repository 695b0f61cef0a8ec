"""Fields of an engine's answers: hostile JSON, of which each value is checked where it is read.

It knows no engine: what a field is called and what it means, each protocol says.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...recipes.errors import MeasureError, short
from ...recipes.strict_json import JsonProblem
from .measurement import MOST_DRAFT_TOKENS

Fields = Mapping[str, Any]


class AnswerProblem(Exception):  # noqa: N818 - not an error of its own: protocols turn it into one
    """One thing wrong with an answer, with the field it stands at."""


@contextmanager
def reading(where: str, fix: str, before: str = "") -> Iterator[None]:
    """Says where something is not as whoever wrote it does, with words before what it is."""
    try:
        yield
    except (AnswerProblem, JsonProblem) as exc:
        raise MeasureError(where, f"{before}{exc}", fix=fix) from exc


def section(fields: Fields, *keys: str) -> Fields:
    """The object to which keys lead, one inside the other; empty where there is none."""
    for key in keys:
        found = fields.get(key)
        fields = found if isinstance(found, Mapping) else {}
    return fields


def optional(fields: Fields, key: str, read: Callable[[Fields, str], Any]) -> Any:
    """What `read` makes of a field; None where it is absent or null."""
    return None if fields.get(key) is None else read(fields, key)


def text(fields: Fields, key: str) -> str:
    """Printable text that is not empty, else AnswerProblem."""
    value = fields.get(key)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise AnswerProblem(f"{key}: expected text, got {short(value)}")
    return value


def whole(fields: Fields, key: str, *, least: int = 0) -> int:
    """A whole number of at least `least`, else AnswerProblem."""
    value = fields.get(key)
    if type(value) is not int or value < least:
        raise AnswerProblem(f"{key}: expected a whole number >= {least}, got {short(value)}")
    return value


def checked_draft_tokens(value: int, where: str) -> int:
    """K, else AnswerProblem: nobody drafts so many tokens, or none."""
    if not 1 <= value <= MOST_DRAFT_TOKENS:
        what = f"expected 1 to {MOST_DRAFT_TOKENS:,} drafted tokens, got {value}"
        raise AnswerProblem(f"{where}: {what}")
    return value


def wholes(fields: Fields, key: str) -> tuple[int, ...]:
    """Whole numbers of at least 0, such as token ids or counts, else AnswerProblem."""
    values = fields.get(key)
    if not isinstance(values, list) or not all(type(i) is int and i >= 0 for i in values):
        raise AnswerProblem(f"{key}: expected a list of whole numbers >= 0, got {short(values)}")
    return tuple(values)


def number(value: object, where: str) -> float:
    """A finite number, else AnswerProblem; an infinite one is null in JSON."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AnswerProblem(f"{where}: expected a number, got {short(value)}")
    return float(value)


def objects(fields: Fields, key: str) -> tuple[Fields, ...]:
    """JSON objects, else AnswerProblem."""
    values = fields.get(key)
    if not isinstance(values, list) or not all(isinstance(v, Mapping) for v in values):
        raise AnswerProblem(f"{key}: expected a list of objects, got {short(values)}")
    return tuple(values)


def object_(fields: Fields, key: str) -> Fields:
    """A JSON object, else AnswerProblem."""
    value = fields.get(key)
    if not isinstance(value, Mapping):
        raise AnswerProblem(f"{key}: expected an object, got {short(value)}")
    return value


def gap(logprobs: Sequence[float]) -> float:
    """Of the most likely token to the second; AnswerProblem if one stands alone."""
    if len(logprobs) < 2:
        raise AnswerProblem(f"expected at least 2 most likely tokens, got {len(logprobs)}")
    first, second = sorted(logprobs, reverse=True)[:2]
    return first - second


def told(fields: Fields, keys: Sequence[str]) -> dict[str, object]:
    """What a server says of these keys: plain values alone, for `ServerIdentity.arguments`."""
    return {key: fields[key] for key in keys if _is_plain(fields.get(key))}


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return value.isprintable()
    return isinstance(value, int | float) and math.isfinite(value)
