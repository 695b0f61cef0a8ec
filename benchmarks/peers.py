"""Other quantizers beside draftquant: one folder, one scheme, the time and memory of each.

    python -m benchmarks.peers WORKDIR [--draft kimi-linear-dflash | --given FOLDER]
        [--schemes fp8 int4] [--python llm-compressor=PATH] [--json]

Each runs in a process and an environment of its own; experiments/engines/tools_setup makes one with
llm-compressor. The draft is generated once and stays in WORKDIR; outputs are deleted
after `draftquant verify --foreign` has compared them with the draft. draftquant verifies its own
before it publishes it, so its figures contain verification; those of the others do not.

For a tool that cannot take the folder the row has its error.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftquant.scripts.dev import PAIRS
from draftquant.scripts.frame.console import stderr

from .command_line import add_draft, benchmark_parser, given_draft, run_benchmark
from .measured_process import BenchError, folder_bytes, run_measured

MAKERS = PAIRS.parent / "engines" / "foreign"
"""Scripts that call other tools, each in the tool's own environment, and leave the embedding, the
head and the fusion as they are, as our recipes do."""
_MAKE = """
import importlib, pathlib, sys
folder, module, scheme, source, out = sys.argv[1:]
sys.path.insert(0, folder)
make = importlib.import_module(module).make
make(scheme, pathlib.Path(source), pathlib.Path(out))
"""
OURS = "draftquant"
RECIPES = {"fp8": "fp8-ptpc", "int4": "int4-group128"}
"""Scheme -> our recipe: FP8 per channel with inputs per token; INT4 by groups of 128."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another tool: its maker, and what it calls our schemes."""

    maker: str
    schemes: Mapping[str, str]


PEERS: Mapping[str, Peer] = {
    "llm-compressor": Peer(
        maker="by_llmcompressor", schemes={"fp8": "FP8_DYNAMIC", "int4": "W4A16"}
    ),
    "quark": Peer(maker="by_quark", schemes={"fp8": "ptpc_fp8", "int4": "int4_wo_128"}),
    "modelopt": Peer(
        maker="by_modelopt",
        schemes={"fp8": "FP8_PER_CHANNEL_PER_TOKEN_CFG", "int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"},
    ),
}
"""llm-compressor's `model_free_ptq`, Quark from file to file, ModelOpt's export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one tool took for one scheme.

    Attributes:
        bytes_out: of the folder that it wrote; 0 where it wrote none.
        found: what our verification says of that folder, or the tool's error.
    """

    scheme: str
    tool: str
    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    bytes_out: int
    found: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `run_benchmark`."""
    parser = benchmark_parser("peers", "Time other quantizers on one folder.")
    add_draft(parser, "kimi-linear-dflash")
    parser.add_argument("--schemes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument(
        "--python", action="append", type=_named_python, default=[], metavar="NAME=PATH",
        help="the interpreter of a tool's environment (default: this one)",
    )  # fmt: skip
    return run_benchmark(parser, arguments, _measure, _columns)


def _measure(asked: argparse.Namespace) -> list[Row]:
    source = given_draft(asked)
    pythons = {name: sys.executable for name in (OURS, *PEERS)} | dict(asked.python)
    return [
        _run(scheme, tool, pythons[tool], source, asked.workdir / f"{tool}-{scheme}")
        for scheme in asked.schemes
        for tool in (OURS, *PEERS)
    ]


def _run(scheme: str, tool: str, python: str, source: Path, out: Path) -> Row:
    """One tool on a warm page cache; its output is verified, measured and deleted."""
    if out.exists():
        raise BenchError(out, "exists already", fix="move it, or use another WORKDIR")
    os.sync()
    for path in source.iterdir():
        path.read_bytes()
    taken = run_measured(python, *_command(scheme, tool, source, out))
    row = Row(
        scheme=scheme,
        tool=tool,
        cpu_seconds=taken.cpu_seconds,
        wall_seconds=taken.wall_seconds,
        peak_bytes=taken.peak_bytes,
        bytes_out=folder_bytes(out),
        found=taken.error or _verified(source, out),
    )
    shutil.rmtree(out, ignore_errors=True)
    stderr().line(f"{tool} {scheme}: {row.cpu_seconds:.1f} CPU s; {row.found}")
    return row


def _command(scheme: str, tool: str, source: Path, out: Path) -> tuple[str, ...]:
    if tool == OURS:
        recipe = ("--recipe", RECIPES[scheme], "--out", str(out))
        return ("-m", "draftquant", "quantize", str(source), *recipe)
    peer = PEERS[tool]
    return ("-c", _MAKE, str(MAKERS), peer.maker, peer.schemes[scheme], str(source), str(out))


def _verified(source: Path, out: Path) -> str:
    command = ("-m", "draftquant", "verify", str(out), "--against", str(source), "--foreign")
    taken = run_measured(sys.executable, *command)
    if taken.status == 0:
        return "verified"
    faults = [line.strip() for line in taken.stdout.splitlines() if line.startswith("  ")]
    return f"{len(faults)} faults: {faults[0]}" if taken.status == 1 and faults else taken.error


def _columns(row: Row) -> dict[str, str]:
    return {
        "scheme and tool": f"{row.scheme} {row.tool}",
        "CPU s": f"{row.cpu_seconds:.1f}",
        "wall s": f"{row.wall_seconds:.1f}",
        "peak MB": f"{row.peak_bytes / 1e6:,.0f}",
        "GB out": f"{row.bytes_out / 1e9:.3f}",
        "found": row.found,
    }


def _named_python(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, NAME one of {', '.join(PEERS)}")
    return name, path


if __name__ == "__main__":
    sys.exit(main())
