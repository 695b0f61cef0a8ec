"""Command lines of benchmarks, which measure, and of simulations, with their tables of rates."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...recipes.errors import DraftQuantError
from ..console import print_error, print_json, print_table, stderr, table
from . import PAIRS as TRAINED_PAIRS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PAIRS = ("eagle3-llama", "eagle3-mla", "dflash")
Row = TypeVar("Row", bound="DataclassInstance")


def benchmark_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """With the folder that a benchmark works in."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("workdir", type=Path)
    return parser


def add_pairs(parser: argparse.ArgumentParser) -> None:
    """The trained pairs that a benchmark measures on."""
    shipped = [TRAINED_PAIRS / name for name in PAIRS]
    parser.add_argument("--pair", type=Path, nargs="*", default=shipped, help="trained pairs")


def run_benchmark(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Sequence[Row]],
    print_rows: Callable[[argparse.Namespace, Sequence[Row]], None],
) -> int:
    """The command line of a benchmark.

    Args:
        parser: with all options but `--json`.
        arguments: None = those of the process.
        measure: the rows of what was asked for.
        print_rows: prints them as a table.

    Returns:
        0 when everything was measured, 2 when something could not be made.
    """
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    asked = parser.parse_args(arguments)
    try:
        rows = measure(asked)
    except DraftQuantError as exc:
        print_error(exc)
        return 2
    if asked.json:
        print_json([asdict(row) for row in rows])
    else:
        print_rows(asked, rows)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One table: a row per scenario, shares of the runs in its columns."""

    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]


def _print(figures: Figures) -> None:
    """Print one table."""
    found = table(figures.title, "scenario", *figures.columns, right=figures.columns)
    for name, shares in figures.rows.items():
        found.row(name, *(f"{share:.1%}" for share in shares))
    print_table(found)


def simulate(
    arguments: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    tables: Mapping[str, Callable[[int, int], Figures]],
    runs: int,
) -> int:
    """The command line of a simulation; returns 0.

    Args:
        arguments: None = those of the process.
        prog: name of the program.
        description: of it.
        tables: what can be asked for: of a number of runs and a seed.
        runs: per scenario, if not said.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--runs", type=int, default=runs, help="simulated gates per scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tables", nargs="+", choices=tables, default=list(tables))
    parser.add_argument("--json", action="store_true", help="print the shares as JSON")
    chosen = parser.parse_args(arguments)
    found = {}
    for name in chosen.tables:
        stderr().line(f"{name}: {chosen.runs} runs per row")
        found[name] = tables[name](chosen.runs, chosen.seed)
        if not chosen.json:
            _print(found[name])
    if chosen.json:
        printed = {name: asdict(figures) for name, figures in found.items()}
        print_json({"runs": chosen.runs, "seed": chosen.seed, "tables": printed})
    return 0
