"""What the simulations of the gate share: their tables of rates, and their command line."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from .console import print_json, print_table, stderr, table


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
