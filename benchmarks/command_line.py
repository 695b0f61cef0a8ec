"""The command line of all benchmarks: a folder to work in, a table or JSON."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from draftquant.recipes.errors import DraftQuantError
from draftquant.scripts.dev.real_shapes.drafts import REAL_DRAFTS
from draftquant.scripts.dev.real_shapes.generate import write_real_shape_draft
from draftquant.scripts.frame.console import print_error, print_json, print_table, table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = TypeVar("Row", bound="DataclassInstance")


def benchmark_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The parser, with the folder that a benchmark works in, created if needed."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{prog}", description=description)
    parser.add_argument("workdir", type=_made)
    return parser


def _made(folder: str) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def add_draft(
    parser: argparse.ArgumentParser, default: str, among: Iterable[str] = REAL_DRAFTS
) -> None:
    """A draft of a published shape, or an existing one."""
    parser.add_argument("--draft", default=default, choices=tuple(among))
    parser.add_argument("--divide", type=int, default=1, help="a smaller draft, for a quick try")
    parser.add_argument("--given", type=Path, metavar="FOLDER", help="a draft that is there")


def given_draft(asked: argparse.Namespace) -> Path:
    """The draft that `add_draft` asked for: generated once, it stays in the folder."""
    if asked.given is not None:
        return Path(asked.given)
    folder: Path = asked.workdir / f"{asked.draft}-{asked.divide}"
    if not folder.exists():
        write_real_shape_draft(folder, draft=asked.draft, divide=asked.divide)
    return folder


def run_benchmark(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Sequence[Row]],
    columns: Callable[[Row], dict[str, str]],
) -> int:
    """The command line of a benchmark.

    Args:
        parser: with all options but `--json`.
        arguments: None = those of the process.
        measure: the rows of what was asked for.
        columns: of a row by their titles; the first says what it is.

    Returns:
        0 when everything was measured, 1 when the row of a failure is among them (`error`), 2 when
        something could not be made.
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
    elif rows:
        print_rows(parser.prog, [columns(row) for row in rows])
    return 1 if any(getattr(row, "error", "") for row in rows) else 0


def print_rows(title: str, rows: Sequence[dict[str, str]]) -> None:
    """One table; all rows have the same columns."""
    found = table(title, *rows[0])
    for row in rows:
        found.row(*row.values())
    print_table(found)
