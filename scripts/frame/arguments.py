"""What the arguments of verbs mean, for Python and the command line: `arguments.toml`.

A record has the fields, and the table says what each of them means. Signatures, documentation, the
parser and `--help` are made from both.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from string import Template
from typing import Any, Literal

from ...recipes.decode import Bounds, MisfitError
from ...recipes.errors import short
from ...recipes.packages import table_beside
from ...recipes.schema import ALGORITHMS
from ...recipes.strict_json import JsonProblem, parse_json

Several = Literal["words", "commas", "repeated"]
"""How a command line gives several values: `--x A B`, `--x A,B`, or `--x A --x B`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a field means, and how a command line gives it: `--num-draft-tokens K`, or `DRAFT`.

    Attributes:
        help: what it means; `$out` in it is what `out` is called where it is read (`explained`).
        place: placeholder of an argument that is given by its place.
        value: placeholder of an option's value; None = the choices, or the field's last word.
        short: one letter, such as "-k".
        flag: the option's name, where it is not the field's.
        several: how several values are given.
        count: how many values of `several`, where that is fixed.
        reads: turns a word in a notation of its own into a value; raises `MisfitError`.
        bounds: what a number may be.
        bare: the value of an option that is given without one; "" = it needs one.
        fix: for a number out of bounds; by default, leave it out or give one within them.
    """

    help: str
    place: str | None = None
    value: str | None = None
    short: str = ""
    flag: str = ""
    several: Several = "words"
    count: int | Literal["+", "?"] = "+"
    reads: Callable[[str], object] | None = None
    bounds: Bounds | None = None
    bare: str = ""
    fix: str = ""

    def spelling(self, name: str) -> str:
        """The name of a field on a command line: `--num-draft-tokens`, or `DRAFT`."""
        return self.place or self.flag or f"--{name.replace('_', '-')}"

    def explained(self, names: Mapping[str, str]) -> str:
        """What it means, with the names of other fields as a command line or a call has them."""
        return Template(self.help).substitute(names)


def options_for(verb: str, record: type, figures: Mapping[str, str]) -> dict[str, Option]:
    """Field -> its meaning, for all fields except the listener; positional ones first."""
    rows = _rows()
    table = {**rows["shared"], **rows.get(verb.partition("_")[0], {}), **rows.get(verb, {})}
    fields = sorted(dataclasses.fields(record), key=lambda each: bool(each.kw_only))
    names = [each.name for each in fields if each.name != "listener"]
    return {name: _option(table[name], {**FIGURES, **figures}) for name in names}


@functools.cache
def _rows() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    return table_beside(__file__)


def _option(row: Mapping[str, Any], figures: Mapping[str, str]) -> Option:
    fields: dict[str, Any] = {
        name: Template(cell).safe_substitute(figures) if isinstance(cell, str) else cell
        for name, cell in row.items()
    }
    if "reads" in fields:
        fields["reads"] = READS[fields["reads"]]
    if "bounds" in fields:
        fields["bounds"] = Bounds(**fields["bounds"])
    return Option(**fields)


# ---- Which option an unknown one was meant to be


def meant(name: str, options: Sequence[str], places: Sequence[str] = ()) -> str | None:
    """The option or argument, without dashes, that a name means or nearly spells; None = none."""
    name = name.lower().replace("_", "-")
    table = table_beside(__file__, "option_words")
    named = [option for option, words in table.items() if name in (option, *words.split())]
    by_meaning = [option for known in (places, options) for option in named if option in known]
    close = difflib.get_close_matches(name, (*places, *options), n=1)
    return next(iter((*by_meaning, *close)), None) or _shared(name, options)


def _shared(name: str, known: Sequence[str]) -> str | None:
    """The option with most words of the name: `--step-time-ms` is like `--target-step-ms`."""
    words = set(name.split("-")) - {"max", "min", "num", "no", "of", "the", "is", "use", "with"}
    most = max(known, key=lambda option: len(words & set(option.split("-"))), default="")
    return most if words & set(most.split("-")) else None


# ---- Words in notations of their own


def share(text: str) -> float:
    """A share as people write it: 0.01 or 1%; a misfit if it is neither."""
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError as exc:
        raise MisfitError(f"expected a share such as 0.01 or 1%, got {short(text)}") from exc


def shares_by_category(text: str) -> Mapping[str, float]:
    """Shares by category: chat=0.7,code=30%; a misfit otherwise, or if a category occurs twice."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        if not name or not equals or name in shares:
            raise MisfitError(
                f"expected CATEGORY=SHARE,..., each once, such as chat=0.7,code=0.3; got {text!r}"
            )
        shares[name] = share(number)
    return shares


def _assignment(text: str) -> Mapping[str, object]:
    """NAME=VALUE; a value that is not JSON is text."""
    name, sign, value = text.partition("=")
    if not name.strip() or not sign:
        raise MisfitError(f"expected NAME=VALUE, got {text!r}")
    decoded: object = value
    with suppress(JsonProblem):
        decoded = parse_json(value)
    return {name.strip().replace("-", "_"): decoded}


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not hours >= 0:
        raise MisfitError(f"expected hours, such as 24, got {short(text)}")
    return hours


READS: Mapping[str, Callable[[str], object]] = {
    "share": share,
    "shares by category": shares_by_category,
    "assignment": _assignment,
    "hours": _hours,
}
FIGURES = {"algorithms": ",".join(ALGORITHMS)}
