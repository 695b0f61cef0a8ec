"""The figures in the table of experiments/acceptance.md, for pictures and advice."""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from ....recipes.regular_file import read_text
from .. import ROOT

ACCEPTANCE = ROOT / "experiments" / "acceptance.md"
_CELL = re.compile(r"[\d.]+, ([-+][\d.]+) \(([-+][\d.]+), ([-+][\d.]+)\) (PASS|FAIL|INCONCLUSIVE)")


class Change(NamedTuple):
    """One cell of the table: a change with its one-sided bounds, in percent."""

    change: float
    lower: float
    upper: float
    verdict: str


@cache
def measured_changes() -> Mapping[str, Mapping[str, Change]]:
    """Recipe -> pair -> change."""
    lines = read_text(ACCEPTANCE).splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    pairs = next(row[1:] for row in rows if row[0] == "recipe")
    found: dict[str, dict[str, Change]] = {}
    for name, *cells in rows:
        changes = [_CELL.fullmatch(cell) for cell in cells]
        if changes and all(changes):
            values = [match.groups() for match in changes if match]
            found[name] = {
                pair: Change(float(change), float(lower), float(upper), verdict)
                for pair, (change, lower, upper, verdict) in zip(pairs, values, strict=True)
            }
    return found
