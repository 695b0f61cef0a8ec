"""`compare` and `tune` at fleet size: what a draft costs among few and among many.

    python -m draftquant.scripts.dev.bench_fleet WORKDIR DRAFT TRACES [--drafts 200] [--json]

Makes drafts in WORKDIR whose weights differ from DRAFT's by a little noise each, so that all have
other tensors, and compares a few, some and all of them with DRAFT: whole commands, each with a new
empty cache. The first row is
`replay DRAFT OTHER` of one of them, which computes what DRAFT proposes as well. The last row is
`tune` of DRAFT with two recipes: it makes a draft for each measurement.
CPU seconds are of all cores together; memory is the resident peak.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from ...validate.tuning.draft_mixture import KEPT
from ..console import print_table, table
from .command_lines import benchmark_parser, run_benchmark
from .measured_process import Taken, measured

FEW = 8
_NOISE = 0.002  # of a weight's standard deviation, times 1 to 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a command took, with so many drafts beside the first."""

    command: str
    drafts: int
    cpu_seconds: float
    peak_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = benchmark_parser("bench_fleet", __doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--drafts", type=int, default=200, help="how many to compare at most")
    return run_benchmark(parser, arguments, _measure, _print)


def make(draft: Path, workdir: Path, number: int) -> Path:
    """A draft like `draft`, with noise of its own."""
    import torch

    out = workdir / f"draft-{number:03}"
    shutil.copytree(draft, out)
    generator = torch.Generator().manual_seed(number)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        for name, one in tensors.items():
            if one.ndim == 2 and one.is_floating_point():
                spread = _NOISE * (1 + number % 10) * float(one.float().std())
                noise = torch.randn(one.shape, generator=generator) * spread
                tensors[name] = (one.float() + noise).to(one.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return out


def _measure(options: argparse.Namespace) -> list[Row]:
    count = options.drafts
    made = [make(options.draft, options.workdir, number) for number in range(1, count + 1)]
    alone = _run(options, "replay", options.draft, made[0])
    rows = [_row("replay", 1, alone)]
    for number in sorted({min(FEW, count), max(1, count // 4), count}):
        report = options.workdir / f"compared-{number}"
        files = ("--html", f"{report}.html", "--report", f"{report}.json")
        rows.append(
            _row("compare", number, _run(options, "compare", options.draft, *made[:number], *files))
        )
    return [*rows, _tuned(options)]


def _tuned(options: argparse.Namespace) -> Row:
    """A search among the mixtures of two formats."""
    how = ("--engine", "vllm", "--arch", "b200", "--fix-config", "--max-drop", "0.9", "--json")
    formats = ("--recipe", "int4-channel", "fp8-ptpc", "--out", options.workdir / "tuned.yaml")
    taken = _run(options, "tune", options.draft, *how, *formats)
    found = json.loads(taken.stdout)
    alone = sum(name != KEPT for each in found["costs"].values() for name in each)
    return _row("tune", alone + len(found["points"]), taken)


def _run(options: argparse.Namespace, *words: object) -> Taken:
    """A whole command on the traces, with an empty cache."""
    cache = options.workdir / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["DRAFTQUANT_CACHE"] = str(cache)
    said = [str(word) for word in (*words, "--traces", options.traces)]
    return measured(said[0], "-m", "draftquant.scripts.cli", *said)


def _row(command: str, drafts: int, taken: Taken) -> Row:
    return Row(
        command=command,
        drafts=drafts,
        cpu_seconds=taken.cpu_seconds,
        peak_bytes=taken.peak_bytes,
    )


def _print(_options: argparse.Namespace, rows: Sequence[Row]) -> None:
    columns = ("drafts", "CPU s", "CPU s a draft", "peak MB")
    found = table("fleets", "command", *columns, right=columns)
    for row in rows:
        each = row.cpu_seconds / row.drafts
        peak = f"{row.peak_bytes / 1e6:,.0f}"
        found.row(row.command, str(row.drafts), f"{row.cpu_seconds:.1f}", f"{each:.2f}", peak)
    print_table(found)


if __name__ == "__main__":
    sys.exit(main())
