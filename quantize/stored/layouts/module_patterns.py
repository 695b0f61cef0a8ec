"""Regular expressions of excludes, matched in bounded time: what `re` answers, without its search.

A declaration is hostile input, and `re` backtracks: `(([a-z._0-9])+)+!` takes longer than anybody
waits. A time limit would answer by the speed of the machine, and libraries of linear time (RE2)
speak another language than the engines. What real folders write is small: characters, escapes,
classes, `.`, groups, alternatives, repeats (lazy ones too), anchors and lookahead. Back references,
lookbehind, flags, possessive and atomic parts are refused. For all else the answer is that of `re`,
because without back references a match is a question of sets of positions:

    a name of n characters has positions 0 .. n, a set of them is a whole number with those bits,
    and every part of a pattern turns the set where it may begin into the set where it may end.

Sets are added and shifted as in Parabix (Cameron et al. 2014, "Bitwise Data Parallelism in Regular
Expression Matching"), so `.*` is one addition. Nothing is searched twice for one set.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from ....recipes.errors import VerifyError, short
from .declaration_reader import not_understood

MAX_PATTERN = 500  # characters; a list of 61 layers has 300
_DEEPEST = 20
_MOST_REPEATS = 1000

_COUNTS = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": lambda character: character.isalnum() or character == "_",
}


class PatternProblem(Exception):  # noqa: N818 - not an error of its own: callers turn it into one
    """Why a pattern is not understood, or not decided for a name."""


@dataclass(frozen=True, slots=True)
class _Characters:
    """One character: of a range, of a category ("d", or "D" for what is none); or of the rest."""

    ranges: tuple[tuple[str, str], ...] = ()
    categories: tuple[str, ...] = ()
    negated: bool = False

    def __contains__(self, character: str) -> bool:
        found = any(low <= character <= high for low, high in self.ranges) or any(
            _CATEGORIES[kind.lower()](character) == kind.islower() for kind in self.categories
        )
        return found != self.negated


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A place: "^" start, "$" end or before a last line feed, "Z" end, "b" edge of a word."""

    kind: str


@dataclass(frozen=True, slots=True)
class _Look:
    """A place from which `part` matches, or does not."""

    part: "_Part"
    negated: bool


@dataclass(frozen=True, slots=True)
class _Choice:
    """One of several sequences of parts."""

    options: tuple[tuple["_Part", ...], ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    """A part again and again; `most` None = without end."""

    part: "_Part"
    least: int
    most: int | None


_Part = _Characters | _Anchor | _Look | _Choice | _Repeat
_ANY = _Characters(ranges=(("\n", "\n"),), negated=True)


def matches(pattern: str, name: str, *, whole: bool = False) -> bool:
    """What `re.match(pattern, name)`, or `re.fullmatch` for the whole name, answers."""
    ends = _Matcher(name, most_steps=100 + 4 * len(pattern)).ends(understood(pattern), 1)
    return bool(ends >> len(name)) if whole else ends > 0


@functools.lru_cache(maxsize=4096)
def understood(pattern: str) -> _Part:
    """The parts of a pattern; PatternProblem where it is none that is understood."""
    if len(pattern) > MAX_PATTERN:
        raise PatternProblem(f"more than {MAX_PATTERN} characters")
    parser = _Parser(pattern)
    found = parser.choice(_DEEPEST)
    if parser.at < len(pattern):
        raise parser.problem("unbalanced parenthesis")
    return found


class _Matcher:
    """Sets of positions of one name, bit i for position i."""

    def __init__(self, name: str, most_steps: int) -> None:
        self._name = name
        self._steps_left = most_steps

    def ends(self, part: _Part, starts: int) -> int:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise PatternProblem(f"too many steps for the name {short(self._name)}")
        match part:
            case _Characters():
                return (starts & _places(part, self._name)) << 1
            case _Anchor(kind):
                return starts & self._anchored(kind)
            case _Look(inner, negated):
                kept = (1 << i for i in range(len(self._name) + 1) if starts >> i & 1)
                return sum(bit for bit in kept if bool(self.ends(inner, bit)) != negated)
            case _Choice(options):
                return functools.reduce(int.__or__, (self._row(o, starts) for o in options))
            case _Repeat(inner, least, most):
                return self._repeated(inner, least, most, starts)

    def _row(self, parts: tuple[_Part, ...], starts: int) -> int:
        for part in parts:
            if not starts:
                break
            starts = self.ends(part, starts)
        return starts

    def _repeated(self, part: _Part, least: int, most: int | None, starts: int) -> int:
        for _ in range(least):
            before, starts = starts, self.ends(part, starts)
            if starts == before:  # and so for ever; nothing is left, or nothing is consumed
                break
        if most is None and isinstance(part, _Characters):  # a carry runs through the run of ones
            places = _places(part, self._name)
            return ((starts & places) + places ^ places) | starts
        found = new = starts
        rounds = len(self._name) + 1 if most is None else most - least
        while new and rounds:
            new = self.ends(part, new) & ~found
            found, rounds = found | new, rounds - 1
        return found

    def _anchored(self, kind: str) -> int:
        end = 1 << len(self._name)
        if kind == "b":
            words = _places(_Characters(categories=("w",)), self._name)
            return words ^ words << 1
        if kind == "$" and self._name.endswith("\n"):
            return end | end >> 1
        return 1 if kind == "^" else end


@functools.lru_cache(maxsize=16384)
def _places(characters: _Characters, name: str) -> int:
    return sum(1 << i for i, character in enumerate(name) if character in characters)


class _Parser:
    """Reads a pattern from left to right; the grammar is that of `re`, less what it refuses."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def problem(self, what: str) -> PatternProblem:
        return PatternProblem(f"{what} at position {self.at}")

    def choice(self, levels: int) -> _Part:
        """Alternatives, up to a closing parenthesis or the end."""
        if not levels:
            raise self.problem(f"more than {_DEEPEST} groups inside each other")
        options: list[tuple[_Part, ...]] = []
        parts: list[_Part] = []
        while (head := self._peek()) not in ("", ")"):
            if head == "|":
                self.at += 1
                options.append(tuple(parts))
                parts = []
            else:
                parts.append(self._item(levels))
        return _Choice((*options, tuple(parts)))

    def _item(self, levels: int) -> _Part:
        part = self._atom(levels)
        counts = self._counts()
        if counts is None:
            return part
        if isinstance(part, _Anchor | _Look):
            raise self.problem("nothing to repeat")
        if self._take("+"):
            raise self.problem("a possessive repeat is not understood")
        self._take("?")  # a lazy repeat finds another match first, but a match all the same
        if self._counts() is not None:
            raise self.problem("multiple repeat")
        return _Repeat(part, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        head = self._peek()
        if head in ("*", "+", "?") and self._take(head):
            return (1 if head == "+" else 0), (1 if head == "?" else None)
        if head != "{":
            return None
        found = _COUNTS.match(self._pattern, self.at)
        if found is None or found[0] == "{}":
            raise self.problem("a brace that counts nothing is not understood")
        least, comma, most = found.groups()
        if len(least) > 4 or len(most) > 4 or max(int(least or 0), int(most or 0)) > _MOST_REPEATS:
            raise self.problem(f"more than {_MOST_REPEATS} repeats")
        low = int(least or 0)
        high = int(most) if most else (None if comma else low)
        if high is not None and high < low:
            raise self.problem("a repeat whose least is more than its most")
        self.at = found.end()
        return low, high

    def _atom(self, levels: int) -> _Part:
        head = self._next()
        if head == "(":
            return self._group(levels)
        if head == "[":
            return self._class()
        if head == "\\":
            head = self._next()
            if head in ("b", "A", "Z"):
                return _Anchor("^" if head == "A" else head)
            return self._escaped(head)
        if head in "*+?{":
            self.at -= 1
            raise self.problem("nothing to repeat")
        if head in "^$":
            return _Anchor(head)
        return _ANY if head == "." else _Characters(ranges=((head, head),))

    def _group(self, levels: int) -> _Part:
        kind = next((kind for kind in ("?:", "?=", "?!") if self._take(kind)), "")
        if not kind and self._peek() == "?":
            raise self.problem("this kind of group is not understood")
        inner = self.choice(levels - 1)
        if not self._take(")"):
            raise self.problem("missing )")
        return _Look(inner, kind == "?!") if kind in ("?=", "?!") else inner

    def _escaped(self, head: str) -> _Characters:
        if head.lower() in _CATEGORIES:
            return _Characters(categories=(head,))
        if head.isascii() and head.isalnum():
            raise self.problem(f"\\{head} is not understood")
        return _Characters(ranges=((head, head),))

    def _class(self) -> _Characters:
        negated = self._take("^")
        ranges: list[tuple[str, str]] = []
        categories: list[str] = []
        first = True
        while first or self._peek() != "]":
            first = False
            low = self._member()
            if self._peek() == "-" and self._pattern[self.at + 1 : self.at + 2] not in ("", "]"):
                self.at += 1
                high = self._member()
                if low.categories or high.categories or low.ranges > high.ranges:
                    raise self.problem("bad character range")
                ranges.append((low.ranges[0][0], high.ranges[0][0]))
            else:
                ranges += low.ranges
                categories += low.categories
        self.at += 1
        return _Characters(tuple(ranges), tuple(categories), negated)

    def _member(self) -> _Characters:
        head = self._next()
        return self._escaped(self._next()) if head == "\\" else _Characters(ranges=((head, head),))

    def _peek(self) -> str:
        return self._pattern[self.at : self.at + 1]

    def _next(self) -> str:
        if not (head := self._peek()):
            raise self.problem("the pattern ends too early")
        self.at += 1
        return head

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found


def is_regex_match(pattern: str, module: str) -> bool:
    """True if an exclude `re:...` matches from the start of a module's name."""
    try:
        return matches(pattern.removeprefix("re:"), module)
    except PatternProblem as exc:
        raise no_pattern("the excludes", module, pattern, exc) from exc


def no_pattern(where: object, key: str, pattern: str, exc: PatternProblem) -> VerifyError:
    """The error for an expression that is not understood."""
    return not_understood(where, key, (f"a regular expression ({exc})",), pattern)
