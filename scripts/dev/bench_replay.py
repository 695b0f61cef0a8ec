"""Tokens per second and memory of recording and replay, on a draft pair of real size, in one run.

    python -m draftquant.scripts.dev.bench_replay WORKDIR [--draft NAME] [--recipe R] [--record]
                                              [--device auto] [--prompts 4] [--tokens 64] [--json]

Each measurement is a process of its own. The pair and its traces, of random weights, text and
features, are made once and stay in WORKDIR: nothing is accepted, and the work is that of a real
pair. Ratios are to the first row, float32 one prompt at a time. `--record` records with a target of
two layers of the same width.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import DraftQuantError
from ..console import print_error, print_json, print_table, stderr, table
from . import REAL_SHAPES
from .measured_process import BenchError, measured, run_measured
from .real_shapes.drafts import DEFAULT_DRAFT, REAL_DRAFTS
from .replay_jobs import NEW_TOKENS

CHILD = "import sys; from draftquant.scripts.dev.replay_jobs import run_job; run_job(sys.argv[1])"
COLUMNS = ("tokens", "seconds", "tokens/s", "ratio", "load s", "peak GB", "estimate GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process: what `run_job` is to do."""

    name: str
    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one process took.

    Attributes:
        tokens: of all prompts, replayed by every draft or recorded.
        seconds: of replaying or recording alone. load_seconds: of loading before it.
        peak_rss_bytes: of the process. estimated_bytes: of the replay, by its headers.
        peak_gpu_bytes: None on a CPU.
        error: last lines of stderr where it failed; its figures then mean nothing.
    """

    name: str
    tokens: int = 0
    seconds: float = 0.0
    load_seconds: float = 0.0
    peak_rss_bytes: int = 0
    estimated_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is in WORKDIR."""

    drafts: tuple[Path, ...]
    traces: Path
    target: Path
    out: Path


def plan_jobs(inputs: Inputs, *, device: str, tokens: int, prompts: int, record: bool) -> list[Job]:
    """Both dtypes, one prompt at a time and together."""
    replay = {"drafts": [*map(str, inputs.drafts)], "traces": str(inputs.traces), "device": device}
    jobs = [
        Job(
            name=f"replay {dtype}, {_together(size)}",
            kind="replay",
            options=replay | {"dtype": dtype, "batch_size": size},
        )
        for dtype in ("float32", "bfloat16")
        for size in (1, None)
    ]
    recorded = {"target": str(inputs.target), "out": str(inputs.out), "device": device,
                "prompts": prompts, "prompt_length": tokens - NEW_TOKENS}  # fmt: skip
    if record:
        jobs += [
            Job(
                name=f"record {dtype}, {_together(size)}",
                kind="record",
                options=recorded | {"dtype": dtype, "batch_size": size or prompts},
            )
            for dtype, size in (("bfloat16", 1), ("bfloat16", None), ("float32", None))
        ]
    return jobs


def _together(size: int | None) -> str:
    return "one prompt at a time" if size == 1 else "prompts together"


def measure(job: Job) -> Measurement:
    """Run one job in a process of its own."""
    described = json.dumps({"kind": job.kind, "options": dict(job.options)})
    taken = run_measured(sys.executable, "-c", CHILD, described)
    if taken.status:
        return Measurement(name=job.name, error=" / ".join(taken.last_lines))
    found = json.loads(taken.stdout.splitlines()[-1])
    return Measurement(name=job.name, peak_rss_bytes=taken.peak_bytes, **found)


def make_inputs(chosen: argparse.Namespace) -> Inputs:
    """Make what is not in WORKDIR yet.

    Raises:
        BenchError: a command failed.
    """
    smaller = "" if chosen.divide == 1 else f"-{chosen.divide}"
    work, name = chosen.workdir, f"{chosen.draft}{smaller}"
    draft, quantized = work / name, work / f"{name}-{chosen.recipe}"
    traces = work / f"traces{smaller}-{chosen.prompts}x{chosen.tokens}"
    target = work / f"target{smaller}"
    divide = ("--divide", str(chosen.divide))
    if not draft.exists():
        measured("draft", "-m", REAL_SHAPES, str(draft), "--draft", chosen.draft, *divide)
    if not quantized.exists():
        measured("quantize", "-m", "draftquant.scripts.cli", "quantize", str(draft), "--recipe",
             chosen.recipe, "--backend", "torch", "--out", str(quantized))  # fmt: skip
    options = {"prompts": chosen.prompts, "tokens": chosen.tokens}
    made = [(traces, "make traces", {"draft": str(draft), "out": str(traces), **options})]
    if chosen.record:
        options = {"draft": chosen.draft, "divide": chosen.divide, "out": str(target)}
        made.append((target, "make target", options))
    for path, kind, asked in made:
        if not path.exists():
            found = measure(Job(name=kind, kind=kind, options=asked))
            if found.error is not None:
                raise BenchError(kind, found.error, fix="use another WORKDIR")
    return Inputs(drafts=(draft, quantized), traces=traces, target=target, out=work)


def print_measurements(measurements: Sequence[Measurement], device: str) -> None:
    """One table for replay and one for recording, each with ratios to its first row."""
    for kind in ("replay", "record"):
        rows = [m for m in measurements if m.name.startswith(kind)]
        if not rows:
            continue
        found = table(f"{kind} on {device}", "run", *COLUMNS, right=COLUMNS)
        for m in rows:
            if m.error is not None:
                found.row(m.name, "failed", *[""] * (len(COLUMNS) - 1))
                continue
            rate, first = m.tokens / m.seconds, rows[0].tokens / (rows[0].seconds or 1)
            estimate = m.estimated_bytes
            found.row(
                m.name,
                f"{m.tokens:,}",
                f"{m.seconds:.1f}",
                f"{rate:.1f}",
                f"{rate / first:.2f}" if first else "",
                f"{m.load_seconds:.1f}",
                f"{(m.peak_gpu_bytes or m.peak_rss_bytes) / 1e9:.2f}",
                "" if estimate is None else f"{estimate / 1e9:.2f}",
            )
        print_table(found)


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_replay", description="Time recording and replay of a draft pair of real size."
    )
    whole = [n for n, d in REAL_DRAFTS.items() if "embed_tokens" in d.shapes(d.config())]
    parser.add_argument("workdir", type=Path, help="folder with room for the pair, up to 13 GB")
    parser.add_argument("--draft", default=DEFAULT_DRAFT, choices=whole)
    parser.add_argument("--recipe", default="mi325x-w4a8", help="of the second draft")
    parser.add_argument("--record", action="store_true", help="record too: 4 GB more in WORKDIR")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:I")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt, at least 24")
    parser.add_argument("--divide", type=int, default=1, help="a smaller pair, for a quick try")
    parser.add_argument("--json", action="store_true", help="print every measurement as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when everything was measured, 1 when a measurement failed, 2 when the pair could not be
        made.
    """
    progress = stderr()
    try:
        chosen = _parser().parse_args(arguments)
        chosen.workdir.mkdir(parents=True, exist_ok=True)
        inputs = make_inputs(chosen)
    except DraftQuantError as exc:
        print_error(exc)
        return 2
    measurements = []
    for job in plan_jobs(
        inputs,
        device=chosen.device,
        tokens=chosen.tokens,
        prompts=chosen.prompts,
        record=chosen.record,
    ):
        progress.line(job.name)
        measurements.append(measure(job))
    if chosen.json:
        print_json([asdict(m) for m in measurements])
    else:
        print_measurements(measurements, chosen.device)
    failed = [m for m in measurements if m.error is not None]
    for m in failed:
        progress.line(f"{m.name} failed: {m.error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
