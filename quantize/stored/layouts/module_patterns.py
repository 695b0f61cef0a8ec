"""Regular expressions of excludes, matched in bounded time: `re`'s answers without its search.

A declaration is hostile input, and `re` backtracks: `(([a-z._0-9])+)+!` takes longer than anybody
waits. With a time limit, answers would depend on the machine's speed, and other libraries have a
different syntax than the engines. So `re` parses, and without back references a match is a question
of sets of positions:

    a name of n characters has positions 0 .. n, a set of them is a whole number with those bits,
    and every part of a pattern turns the set where it may begin into the set where it may end.

Sets are added and shifted as in Parabix (Cameron et al. 2014, "Bitwise Data Parallelism in Regular
Expression Matching"), so `.*` is one addition. No set is searched twice. Back
references, lookbehind, flags, possessive and atomic parts are refused.
"""

import functools
import re
import warnings
from collections.abc import Iterable, Iterator
from re import _compiler, _parser  # type: ignore[attr-defined]  # hypothesis reads them, too
from typing import Any

from ....recipes.errors import VerifyError, short
from .declaration_reader import not_understood

MAX_PATTERN = 500  # characters; a list of 61 layers has 300
_DEEPEST = 20
Part = tuple[str, Any]
"""A name of `re._constants`, or "ONE" for any part of one character, and its arguments."""
Row = tuple[Part, ...]


class PatternProblem(Exception):  # noqa: N818 - not an error of its own: callers turn it into one
    """Why a pattern is not understood, or cannot be decided for a name."""


def matches(pattern: str, name: str, *, whole: bool = False) -> bool:
    """What `re.match(pattern, name)`, or `re.fullmatch` for the whole name, would return."""
    ends = _Matcher(name, most_steps=100 + 4 * len(pattern)).row(understood(pattern), 1)
    return bool(ends >> len(name)) if whole else ends > 0


@functools.lru_cache(maxsize=4096)
def understood(pattern: str) -> Row:
    """The parts of a pattern; PatternProblem where the pattern is not understood."""
    if len(pattern) > MAX_PATTERN:
        raise PatternProblem(f"more than {MAX_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about syntax that may change one day
            parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as exc:
        raise PatternProblem(str(exc)) from exc
    if parsed.state.flags != re.UNICODE:
        raise PatternProblem("flags are not understood")
    return tuple(_parts(parsed.state, parsed, _DEEPEST))


def _parts(state: object, parsed: Iterable[tuple[object, Any]], levels: int) -> Iterator[Part]:
    """What `re` parsed, as tuples; a part of one character as the expression that decides it."""
    if not levels:
        raise PatternProblem(f"more than {_DEEPEST} groups inside each other")
    for constant, of in parsed:
        kind = str(constant)

        def row(inner: Iterable[tuple[object, Any]]) -> Row:
            return tuple(_parts(state, inner, levels - 1))

        match kind, of:
            case (("LITERAL" | "NOT_LITERAL" | "ANY" | "IN"), _):
                yield "ONE", _compiler.compile(_parser.SubPattern(state, [(constant, of)]))
            case "AT", place if str(place) != "AT_NON_BOUNDARY":
                yield kind, str(place)
            case "BRANCH", (_, options):
                yield kind, tuple(map(row, options))
            case "SUBPATTERN", (_, 0, 0, inner):
                yield kind, row(inner)
            case (("ASSERT" | "ASSERT_NOT"), (1, inner)):
                yield kind, row(inner)
            case (("MAX_REPEAT" | "MIN_REPEAT"), (least, most, inner)):
                yield "REPEAT", (least, None if most == _parser.MAXREPEAT else most, row(inner))
            case _:
                raise PatternProblem(f"{kind.lower()} is not understood")


class _Matcher:
    """Sets of positions of one name, bit i for position i."""

    def __init__(self, name: str, most_steps: int) -> None:
        self._name = name
        self._steps_left = most_steps

    def row(self, parts: Row, starts: int) -> int:
        for part in parts:
            if not starts:
                break
            starts = self._ends(*part, starts)
        return starts

    def _ends(self, kind: str, of: Any, starts: int) -> int:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise PatternProblem(f"too many steps for the name {short(self._name)}")
        match kind:
            case "ONE":
                return (starts & _places(of, self._name)) << 1
            case "SUBPATTERN":
                return self.row(of, starts)
            case "BRANCH":
                return functools.reduce(int.__or__, (self.row(option, starts) for option in of))
            case "REPEAT":
                return self._repeated(of, starts)
            case "AT":
                return starts & self._anchored(of)
        kept = (1 << i for i in range(len(self._name) + 1) if starts >> i & 1)
        return sum(bit for bit in kept if bool(self.row(of, bit)) == (kind == "ASSERT"))

    def _repeated(self, of: tuple[int, int | None, Row], starts: int) -> int:
        least, most, parts = of
        for _ in range(least):
            before, starts = starts, self.row(parts, starts)
            if starts == before:  # it stays so: nothing is left, or nothing is consumed
                break
        if most is None and len(parts) == 1 and parts[0][0] == "ONE":
            places = _places(parts[0][1], self._name)
            return ((starts & places) + places ^ places) | starts  # a carry runs through the ones
        reached = new = starts
        rounds = len(self._name) + 1 if most is None else most - least
        while new and rounds:
            new = self.row(parts, new) & ~reached
            reached, rounds = reached | new, rounds - 1
        return reached

    def _anchored(self, place: str) -> int:
        end = 1 << len(self._name)
        if place == "AT_BOUNDARY":
            words = _places(re.compile(r"\w"), self._name)
            return words ^ words << 1
        if place == "AT_END" and self._name.endswith("\n"):
            return end | end >> 1
        return end if place.startswith("AT_END") else 1


@functools.lru_cache(maxsize=16384)
def _places(pattern: re.Pattern[str], name: str) -> int:
    return sum(1 << i for i, character in enumerate(name) if pattern.match(character))


def is_regex_match(pattern: str, module: str) -> bool:
    """True if an exclude `re:...` matches from the start of a module's name."""
    try:
        return matches(pattern.removeprefix("re:"), module)
    except PatternProblem as exc:
        raise no_pattern("the excludes", module, pattern, exc) from exc


def no_pattern(where: object, key: str, pattern: str, exc: PatternProblem) -> VerifyError:
    """The error for an expression that is not understood."""
    return not_understood(where, key, (f"a regular expression ({exc})",), pattern)
