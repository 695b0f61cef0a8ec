"""Speed and memory of `quantize` and `transcode` beside `cp` of what they read, in one run.

    python -m draftquant.scripts.dev.bench_quantize WORKDIR [--draft NAME] [--given FOLDER]
        [--recipes fp8-ptpc] [--backends torch] [--transcode] [--rounds 3] [--json]

Each measurement is a process of its own. The draft is generated once and stays in WORKDIR; outputs
are deleted after measuring. The page cache is warm: before each measurement dirty pages are flushed
and the source is read.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import REAL_SHAPES
from .measured_process import run_measured
from .real_shapes.drafts import DEFAULT_DRAFT, REAL_DRAFTS

CLI = "import sys; from draftquant.scripts.cli import main; sys.exit(main())"
CASES = (
    ("int4-channel", "torch"),
    ("mi325x-w4a8", "torch"),
    ("mi325x-w4a8", "quark"),
    ("mi325x-w4a8-fp8", "torch"),
    ("fp8-ptpc", "torch"),
    ("blackwell-nvfp4", "torch"),
    ("mxfp4", "torch"),
    ("blackwell-fp8", "modelopt"),
    ("blackwell-fp8", "torch"),
)
STATIC_RECIPES = {"blackwell-fp8", "blackwell-nvfp4"}
TRANSCODED = "int4-channel", "quark"
"""The recipe of what is transcoded, and the layout that it gets."""
SYNC = "cp and sync"
SYNC_QUANTIZED = "cp and sync (quantized)"
COLUMNS = ("wall s", "write s", "verify s", "cpu s", "peak MB", "GB out", "x cp+sync")
READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command to measure; it writes `out`.

    Attributes:
        source: what it reads.
        beside: name of the job that copies the same.
    """

    name: str
    command: tuple[str, ...]
    source: Path
    out: Path
    beside: str = SYNC


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one process took.

    Attributes:
        write_seconds, verify_seconds: the stages of `quantize`, as the command itself reports them.
        error: last lines of stderr where the command failed; its figures then mean nothing.
    """

    name: str
    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    bytes_out: int
    beside: str = SYNC
    write_seconds: float | None = None
    verify_seconds: float | None = None
    error: str | None = None


def plan_jobs(
    draft: Path, work: Path, backends: Sequence[str], recipes: Sequence[str]
) -> list[Job]:
    """`cp` and sync, then every chosen case; all outputs lie in `work`."""
    jobs = [_copy(SYNC, draft, work)]
    for recipe, backend in CASES:
        if recipe in recipes and backend in backends:
            out = work / f"bench-{recipe}-{backend}"
            scale = ("--input-scale", "1.0") if recipe in STATIC_RECIPES else ()
            command = (sys.executable, "-c", CLI, "quantize", str(draft), "--recipe", recipe,
                       "--backend", backend, "--out", str(out), "--json", *scale)  # fmt: skip
            name = f"{recipe} ({backend})"
            jobs.append(Job(name=name, command=command, source=draft, out=out))
    return jobs


def plan_transcoding(quantized: Path, work: Path) -> list[Job]:
    """`cp` and sync of a quantized folder, and the same codes in another layout."""
    out = work / "bench-transcoded"
    command = (sys.executable, "-c", CLI, "transcode", str(quantized),
               "--layout", TRANSCODED[1], "--out", str(out))  # fmt: skip
    name = f"transcode {TRANSCODED[0]} to {TRANSCODED[1]}"
    job = Job(name=name, command=command, source=quantized, out=out, beside=SYNC_QUANTIZED)
    return [_copy(SYNC_QUANTIZED, quantized, work), job]


def _copy(name: str, source: Path, work: Path) -> Job:
    copy = work / "bench-copy"
    command = ("sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "sh", str(source), str(copy))
    return Job(name=name, command=command, source=source, out=copy, beside=name)


def measure(job: Job) -> Measurement:
    """Run one job with a warm page cache, and delete what it wrote.

    Raises:
        FileExistsError: its output is there already, from somebody else.
    """
    if job.out.exists():
        raise FileExistsError(f"{job.out}: exists already\n  fix: move it, or use another WORKDIR")
    os.sync()
    for file in sorted(job.source.glob("*.safetensors")):
        _read(file)
    taken = run_measured(*job.command)
    bytes_out = _delete(job.out)
    stages = {} if taken.status else _stages(taken.stdout)
    return Measurement(
        name=job.name,
        wall_seconds=taken.wall_seconds,
        cpu_seconds=taken.cpu_seconds,
        peak_rss_bytes=taken.peak_bytes,
        bytes_out=bytes_out,
        beside=job.beside,
        write_seconds=stages.get("write"),
        verify_seconds=stages.get("verify"),
        error="\n".join(taken.last_lines) if taken.status else None,
    )


def summarize(rounds: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """One measurement per job: of all rounds the one with the median wall time, and any failure."""
    summary = []
    for of_one_job in zip(*rounds, strict=True):
        failed = [m for m in of_one_job if m.error is not None]
        middle = statistics.median_low(m.wall_seconds for m in of_one_job)
        summary.append(failed[0] if failed else
                       next(m for m in of_one_job if m.wall_seconds == middle))  # fmt: skip
    return summary


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as stream:
        buffer = bytearray(READ_BYTES)
        while stream.readinto(buffer):
            continue


def _delete(out: Path) -> int:
    """Delete an output; returns the bytes that it held."""
    if out.is_dir():
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        shutil.rmtree(out)
        return size
    size = out.stat().st_size if out.exists() else 0
    out.unlink(missing_ok=True)
    return size


def _stages(printed: str) -> dict[str, float]:
    """`seconds` of what `--json` prints: {"write": ..., "verify": ...}."""
    if not printed.startswith("{"):
        return {}  # cp prints nothing
    seconds = json.loads(printed).get("seconds", {})
    return {stage: float(value) for stage, value in seconds.items()}


def _table(measurements: Sequence[Measurement]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run")
    for title in COLUMNS:
        table.add_column(title, justify="right")
    for m in measurements:
        if m.error is not None:
            table.add_row(m.name, "failed")
            continue
        copied = next(base for base in measurements if base.name == m.beside)
        table.add_row(
            m.name,
            f"{m.wall_seconds:.1f}",
            *("" if s is None else f"{s:.1f}" for s in (m.write_seconds, m.verify_seconds)),
            f"{m.cpu_seconds:.1f}",
            f"{m.peak_rss_bytes / 1e6:.0f}",
            f"{m.bytes_out / 1e9:.3f}",
            f"{m.wall_seconds / copied.wall_seconds:.2f}",
        )
    return table


def _generate(draft: Path, name: str, divide: int) -> int:
    """Run the generator, which says on stderr what is wrong; returns its exit code."""
    command = (sys.executable, "-m", REAL_SHAPES, str(draft),
               "--draft", name, "--divide", str(divide))  # fmt: skip
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_quantize", description="Measure 'draftquant quantize' beside cp."
    )
    backends = tuple(dict.fromkeys(backend for _, backend in CASES))
    recipes = tuple(dict.fromkeys(recipe for recipe, _ in CASES))
    parser.add_argument("workdir", type=Path, help="folder with room for two drafts, up to 13 GB")
    parser.add_argument("--draft", default=DEFAULT_DRAFT, choices=REAL_DRAFTS)
    parser.add_argument("--given", type=Path, metavar="FOLDER", help="a draft that is there")
    parser.add_argument("--transcode", action="store_true", help="measure transcode too")
    parser.add_argument("--backends", type=_names(backends), default=backends)
    parser.add_argument("--recipes", type=_names(recipes), default=recipes)
    parser.add_argument("--rounds", type=int, default=3, help="report the median of so many runs")
    parser.add_argument("--divide", type=int, default=1, help="a smaller draft, for a quick try")
    parser.add_argument("--json", action="store_true", help="print every measurement as JSON")
    return parser


def _names(known: Sequence[str]) -> Any:
    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = sorted(set(chosen) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return chosen

    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when everything was measured, 1 when a command failed, 2 when the draft could not be
        generated or an output is in the way.
    """
    progress = Console(stderr=True)
    chosen = _parser().parse_args(arguments)
    chosen.workdir.mkdir(parents=True, exist_ok=True)
    smaller = "" if chosen.divide == 1 else f"-{chosen.divide}"
    draft = chosen.given or chosen.workdir / f"{chosen.draft}{smaller}"
    if not draft.exists() and _generate(draft, chosen.draft, chosen.divide) != 0:
        return 2
    jobs = plan_jobs(draft, chosen.workdir, chosen.backends, chosen.recipes)
    rounds: list[list[Measurement]] = []
    quantized = chosen.workdir / "bench-quantized"
    if chosen.transcode:
        command = ("quantize", str(draft), "--recipe", TRANSCODED[0], "--out", str(quantized))
        done = run_measured(sys.executable, "-c", CLI, *command)
        if done.status:
            progress.print("\n".join(done.last_lines), style="red", markup=False)
            return 2
        jobs += plan_transcoding(quantized, chosen.workdir)
    try:
        measure(jobs[0])  # not counted: fresh page-cache memory is slow
        for number in range(chosen.rounds):
            rounds.append([])
            for job in jobs:
                progress.print(f"round {number + 1} of {chosen.rounds}: {job.name}")
                rounds[-1].append(measure(job))
    except FileExistsError as exc:
        progress.print(str(exc), style="red")
        return 2
    finally:
        _delete(quantized)
    summary = summarize(rounds)
    if chosen.json:
        measured = [[asdict(m) for m in one] for one in rounds]
        print(json.dumps({"page_cache": "warm", "rounds": measured}, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(_table(summary))
        console.print(f"page cache warm; median of {chosen.rounds} round(s); load now "
                      f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")  # fmt: skip
    failures = [m for m in summary if m.error is not None]
    for m in failures:
        progress.print(f"{m.name} failed:\n{m.error}", style="red", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
