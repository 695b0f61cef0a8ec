"""Conditions of rows: whether the facts of a question are what a row wants.

The table `when` of a row has names of facts -> what they are: a value; a list that has it;
`{ not = [...] }`, which has it not; or `{ multiple_of = n }`. True means that there is a value,
false that there is none, or that it is 0 or empty. A row counts whose `when` holds, whose `unless`
does not, and of whose `gpus` the fact `gpu` is one. A fact that its question does not have is a
KeyError.
"""

from collections.abc import Mapping
from typing import Any

Facts = Mapping[str, Any]
"""What rows about one subject may ask for and quote: whoever asks about it names all of them."""


def counts(row: Mapping[str, Any], facts: Facts) -> bool:
    """Whether the facts meet the condition of a row and not its exception, on one of its GPUs."""
    if not holds(row.get("when", {}), facts) or ("unless" in row and holds(row["unless"], facts)):
        return False
    return "gpus" not in row or facts["gpu"].is_one_of(row["gpus"])


def holds(condition: Mapping[str, Any], facts: Facts) -> bool:
    """Whether each fact is what a condition wants."""
    asked = [(facts[name], wanted) for name, wanted in condition.items()]
    return all(_meets(fact, wanted) for fact, wanted in asked)


def _meets(fact: Any, wanted: Any) -> bool:
    match wanted:
        case bool():
            return bool(fact) is wanted
        case list():
            return fact in wanted
        case {"not": others}:
            return fact not in others
        case {"multiple_of": step}:
            return bool(fact % step == 0)
    return bool(fact == wanted)
