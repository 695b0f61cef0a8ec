"""Speed and memory of `quantize` beside `cp` of what it reads, in one run.

    python -m benchmarks.quantize WORKDIR [--draft NAME | --given FOLDER] [--divide 1]
        [--recipes fp8-ptpc] [--backend torch] [--rounds 3] [--json]

Each measurement is a process of its own. The draft is generated once and stays in WORKDIR; outputs
are deleted after measuring. The page cache is warm: before each measurement dirty pages are flushed
and the source is read. Among several rounds a row is the one with the median wall time.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftquant.recipes import load_recipe
from draftquant.scripts.dev.real_shapes.drafts import DEFAULT_DRAFT
from draftquant.scripts.frame.console import stderr

from .command_line import add_draft, benchmark_parser, given_draft, run_benchmark
from .measured_process import BenchError, folder_bytes, run_measured

RECIPES = ("int4-channel", "fp8-ptpc", "mi325x-w4a8-fp8", "blackwell-nvfp4", "mxfp4")
COPY = ("sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "sh")
READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one process took.

    Attributes:
        copies: multiple of the wall time of `cp` and sync of what it read.
        write_seconds, verify_seconds: the stages of `quantize`, as the command itself reports them;
            None of `cp`.
        error: last line of stderr where the command failed; its figures then mean nothing.
    """

    name: str
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    bytes_out: int
    copies: float = 1.0
    write_seconds: float | None = None
    verify_seconds: float | None = None
    error: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `run_benchmark`."""
    parser = benchmark_parser("quantize", "Measure 'draftquant quantize' beside cp.")
    add_draft(parser, DEFAULT_DRAFT)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--backend", default="torch", choices=("torch", "quark", "modelopt"))
    parser.add_argument("--rounds", type=int, default=3)
    return run_benchmark(parser, arguments, _measure, _columns)


def _measure(asked: argparse.Namespace) -> list[Row]:
    draft, out = given_draft(asked), asked.workdir / "measured"
    commands = {"cp and sync": (*COPY, str(draft), str(out))}
    for recipe in asked.recipes:
        scale = ("--input-scale", "1.0") if load_recipe(recipe).needs_input_scales else ()
        commands[recipe] = (
            *(sys.executable, "-m", "draftquant", "quantize", str(draft), "--json"),
            *("--recipe", recipe, "--backend", asked.backend, "--out", str(out), *scale),
        )
    _row("cp and sync", commands["cp and sync"], draft, out, None)  # fresh pages are slow
    rounds = []
    for number in range(asked.rounds):
        rows: list[Row] = []
        for name, command in commands.items():
            stderr().line(f"round {number + 1} of {asked.rounds}: {name}")
            rows.append(_row(name, command, draft, out, rows[0] if rows else None))
        rounds.append(rows)
    return [_median(found) for found in zip(*rounds, strict=True)]


def _row(name: str, command: Sequence[str], source: Path, out: Path, copied: Row | None) -> Row:
    """Run one command with a warm page cache, and delete what it wrote."""
    if out.exists():
        raise BenchError(out, "exists already", fix="move it, or use another WORKDIR")
    os.sync()
    for file in sorted(source.glob("*.safetensors")):
        _read(file)
    taken = run_measured(*command)
    bytes_out = folder_bytes(out)
    shutil.rmtree(out, ignore_errors=True)
    seconds = json.loads(taken.stdout)["seconds"] if copied and not taken.status else {}
    return Row(
        name=name,
        wall_seconds=taken.wall_seconds,
        cpu_seconds=taken.cpu_seconds,
        peak_bytes=taken.peak_bytes,
        bytes_out=bytes_out,
        copies=taken.wall_seconds / copied.wall_seconds if copied else 1.0,
        write_seconds=seconds.get("write"),
        verify_seconds=seconds.get("verify"),
        error=taken.error,
    )


def _median(found: Sequence[Row]) -> Row:
    """The one in the middle, or one that failed."""
    ordered = sorted(found, key=lambda row: row.wall_seconds)
    return next((row for row in found if row.error), ordered[(len(ordered) - 1) // 2])


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as stream:
        buffer = bytearray(READ_BYTES)
        while stream.readinto(buffer):
            continue


def _columns(row: Row) -> dict[str, str]:
    stages = {"write s": row.write_seconds, "verify s": row.verify_seconds}
    return {
        "run": row.name,
        "wall s": row.error or f"{row.wall_seconds:.1f}",
        **{name: "" if s is None else f"{s:.1f}" for name, s in stages.items()},
        "CPU s": f"{row.cpu_seconds:.1f}",
        "peak MB": f"{row.peak_bytes / 1e6:,.0f}",
        "GB out": f"{row.bytes_out / 1e9:.3f}",
        "x cp and sync": f"{row.copies:.2f}",
    }


if __name__ == "__main__":
    sys.exit(main())
