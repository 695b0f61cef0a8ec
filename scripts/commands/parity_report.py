"""What the verbs of `parity` share: printing findings, and the exit code."""

from typing import TYPE_CHECKING

from ..console import print_json, print_table, stdout, table
from .gate_report import COLOURS

if TYPE_CHECKING:
    from ...validate.parity.finding import Findings


def show_findings(found: "Findings", *, as_json: bool) -> int:
    """Print findings, and give the exit code of the worst verdict."""
    from ...validate.parity.finding import to_mapping

    if as_json:
        print_json(to_mapping(found.findings))
    else:
        _print(found)
    return found.exit_code


def _print(found: "Findings") -> None:
    numbers = ("figure", "lower bound", "upper bound", "threshold")
    rows = table("Parity", "check", "of", *numbers, "verdict", right=numbers)
    for one in found.findings:
        rows.row(
            one.check,
            one.what,
            *(_number(x) for x in (one.estimate, one.lower, one.upper, one.threshold)),
            one.verdict,
            style=COLOURS[one.verdict],
        )
    print_table(rows)
    for one in found.findings:
        stdout().line((one.verdict, f"bold {COLOURS[one.verdict]}"), f": {one.what}: {one.reason}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
