"""What a part of the run found: rows of tables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table.

    Attributes:
        table: its title.
        cells: column -> what stands there.
        ok: False where something is not as it must be; None where nothing is asked.
    """

    table: str
    cells: Mapping[str, str]
    ok: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where parts run, and how large.

    Attributes:
        device: a GPU, or the CPU where the code itself is tried.
        tiny: shapes that a CPU computes in seconds.
        work: folder for drafts and traces.
    """

    device: torch.device
    tiny: bool
    work: Path


def markdown(rows: Iterable[Row]) -> str:
    """The tables, one after the other; what is wrong is in bold."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row)
    parts = []
    for title, found in tables.items():
        columns = list(dict.fromkeys(column for row in found for column in row.cells))
        lines = [columns, ["---"] * len(columns)]
        for row in found:
            cells = [row.cells.get(column, "") for column in columns]
            lines.append([f"**{cell}**" for cell in cells] if row.ok is False else cells)
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"
