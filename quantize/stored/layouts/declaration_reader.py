"""Strict reading of one JSON object of a declaration: every key must be understood.

An unread key is an error at the end: it could change what the stored numbers mean.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from ....recipes.errors import DeclarationError, short
from ....recipes.packages import table_beside

_TABLE = table_beside(__file__)
UNREAD_METHODS: Mapping[str, str] = {
    method: row["why"] for row in _TABLE["unread"] for method in row["methods"]
}
"""Reasons by quant_method."""
OTHER_WAY = "dequantize it with {}'s own library, or quantize the BF16 draft again"


def way_out(key: str, got: object) -> str | None:
    """What to do about a declaration that is not read; None where there is no particular advice."""
    for row in _TABLE["way_out"]:
        if key.endswith(tuple(row["keys"])) and got in row.get("values", [got]):
            return str(row["way"])
    return None


_MOST_NAMES, _LONGEST_NAME, _MOST_CHARACTERS = 1000, 1000, 60_000
_MOST_LAYERS, _LAYER = 256, re.compile(r"layers\.(\d+)")
_MOST_EXPRESSIONS = 4000  # characters of patterns that are more than a name with stars
SPEC_NO_MEANING = frozenset(_TABLE["no_meaning"]["spec"].split())
"""Keys of a tensor's spec that say how values were found, never how to decode them."""
INTEGERS_NO_MEANING = frozenset(_TABLE["no_meaning"]["integers"].split())
"""How values were found, which modules were looked at, and which kernels to use."""
ChoiceT = TypeVar("ChoiceT", bound=str | int | bool)
Strictness = Literal["folder", "declaration", "engine"]
"""What must be understood.

"folder": all that a folder declares, in each of its files, and every pattern; "declaration": one
declaration and its patterns; "engine": what engines accept too, whatever the patterns are.
"""


def not_understood(
    where: object, key: str, understood: Collection[str], got: object
) -> DeclarationError:
    """The error for a value, or a key, whose meaning is not known here."""
    return DeclarationError(
        where,
        f"{key}: understood {'is' if len(understood) == 1 else 'are'} {' or '.join(understood)},"
        f" got {short(got)}",
        fix=way_out(key, got)
        or "quantize again with a supported layout, or correct the declaration",
    )


class ObjectReader:
    """One JSON object; keys are marked as they are read; `key` is its path inside the file."""

    def __init__(
        self,
        value: object,
        where: object,
        key: str,
        ignored: Collection[str] = (),
        strictness: Strictness = "folder",
    ) -> None:
        if not isinstance(value, dict):
            raise not_understood(where, key, ("a JSON object",), value)
        self.where = where
        self.key = key
        self.strictness = strictness
        self._value: dict[str, Any] = value
        self._seen = set(ignored)

    def refused(self, key: str, understood: Collection[str], got: object) -> DeclarationError:
        """The error for the value of a key."""
        return not_understood(self.where, self._path(key), understood, got)

    def says(self, key: str, value: int) -> bool:
        """True if the key exists with exactly this whole number; it then counts as read."""
        matches = type(self._value.get(key)) is int and self._value[key] == value
        self._seen |= {key} if matches else set()
        return matches

    def skip(self, *keys: str) -> None:
        """Mark keys that need not be read."""
        self._seen.update(keys)

    def has(self, key: str) -> bool:
        """True if the key exists and is not null."""
        return self.as_it_is(key) is not None

    def names(self) -> tuple[str, ...]:
        """All keys."""
        return tuple(self._value)

    def as_it_is(self, key: str) -> Any:
        """The value, whatever it is; None where there is none."""
        self._seen.add(key)
        return self._value.get(key)

    def plain(self, key: str) -> dict[str, Any]:
        """A nested object as it is, for another reader to check; {} where there is none."""
        value = self._value.get(key)
        return value if isinstance(value, dict) else {}

    def named(self, key: str) -> "dict[str, ObjectReader]":
        """A nested object of objects, by names or patterns; a missing key gives none."""
        if not self.has(key):
            return {}
        section = self.section(key)
        if problem := _too_many(list(section.names())):
            raise self.refused(key, (problem,), self._value[key])
        return {name: section.section(name) for name in section.names()}

    def section(self, key: str, ignored: Collection[str] = ()) -> "ObjectReader":
        """A nested object that must exist."""
        return self._inside(self.as_it_is(key), key, ignored)

    def sections(self, key: str, ignored: Collection[str]) -> "list[ObjectReader]":
        """A nested object, or a list of such, that must exist and hold at least one."""
        value = self.as_it_is(key)
        if not isinstance(value, list):
            return [self.section(key, ignored)]
        if not value:
            raise self.refused(key, ("a JSON object",), value)
        return [self._inside(item, f"{key}[{i}]", ignored) for i, item in enumerate(value)]

    def choice(self, key: str, *understood: ChoiceT) -> ChoiceT:
        """A value that must exist and be one of `understood`, of the same JSON type."""
        got = self.as_it_is(key)
        for value in understood:
            if type(got) is type(value) and got == value:
                return value
        raise self.refused(key, [repr(v) for v in understood], got)

    def exactly(self, **wanted: str | int | bool) -> None:
        """Values that must exist and equal these."""
        for key, value in wanted.items():
            self.choice(key, value)

    def value(self, key: str, default: ChoiceT | None, *understood: ChoiceT) -> ChoiceT:
        """A value that is one of `understood`; if missing or null, the default, if there is one."""
        return self.choice(key, *understood) if self.has(key) or default is None else default

    def optional(self, key: str, *understood: str | int | bool | None) -> None:
        """A value that may be missing, and otherwise is one of `understood`."""
        self._seen.add(key)
        got = self._value.get(key, understood[0])
        if not any(type(got) is type(value) and got == value for value in understood):
            raise self.refused(key, [repr(v) for v in understood], got)

    def absent(self, *keys: str) -> None:
        """Keys that would change the meaning: they must be missing, null, false or empty."""
        self._seen.update(keys)
        for key in keys:
            got = self._value.get(key)
            if got not in (None, False, [], {}) or (got == 0 and type(got) is not bool):
                raise self.refused(key, ("null",), got)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of names or patterns; a missing key gives none. The longest real one has 600."""
        got = self.as_it_is(key)
        if got is None:
            return ()
        if not isinstance(got, list) or not all(isinstance(item, str) for item in got):
            raise self.refused(key, ("a list of names",), got)
        if problem := _too_many(got):
            raise self.refused(key, (problem,), got)
        return tuple(got)

    def same_strings(self, key: str, like: str, what: str, wanted: Collection[str]) -> None:
        """A second list equal to `wanted`, the value of the key `like`, in any order, or none."""
        got = self.strings(key)
        if self.has(key) and set(got) != set(wanted):
            raise self.refused(key, (f"the same {what} as {like} {sorted(wanted)}",), sorted(got))

    def one_of_lists(self, key: str, *understood: tuple[int, ...]) -> tuple[int, ...]:
        """A list that must exist and hold exactly the whole numbers of one of these."""
        got = self.as_it_is(key)
        whole = isinstance(got, list) and all(type(item) is int for item in got)
        if not whole or tuple(got) not in understood:
            raise self.refused(key, [str(list(each)) for each in understood], got)
        return tuple(got)

    def finish(self) -> None:
        """Every key must have been read."""
        for key in self._value:
            if key not in self._seen:
                known = sorted(self._seen)
                raise self.refused(f"{key} (unknown key)", known, self._value[key])

    def _inside(self, value: object, key: str, ignored: Collection[str]) -> "ObjectReader":
        return ObjectReader(value, self.where, self._path(key), ignored, self.strictness)

    def _path(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key


def _too_many(names: list[str]) -> str | None:
    """What is allowed, where names or patterns are too many to match with each linear's names."""
    if len(names) > _MOST_NAMES or max(map(len, names), default=0) > _LONGEST_NAME:
        return f"at most {_MOST_NAMES} names of at most {_LONGEST_NAME} characters"
    if sum(map(len, names)) > _MOST_CHARACTERS:
        return f"at most {_MOST_CHARACTERS} characters of names"
    if sum(len(name) for name in names if set(name) & set("(+?{[|^$\\")) > _MOST_EXPRESSIONS:
        return f"at most {_MOST_EXPRESSIONS} characters of regular expressions"
    if len(set(_LAYER.findall(" ".join(names)))) > _MOST_LAYERS:
        return f"names of at most {_MOST_LAYERS} layers"
    return None
