"""Tokens per second and memory of recording and replay, on a draft pair of real size, in one run.

    python -m draftquant.scripts.dev.bench_replay WORKDIR [--draft NAME] [--recipe R] [--record]
                                              [--device auto] [--prompts 4] [--tokens 64] [-k 3 7]
                                              [--dtype bfloat16] [--beside PYTHON] [--json]

Each measurement is a process of its own. The pair of random weights and traces of which it is right
about a share (see `real_shapes.traces`) are made once and stay in WORKDIR. Ratios are to the first
row, float32 one prompt at a time. "of GEMM" is the share of the time that one large product would
take for the same multiplications. `--record` records with a target of two layers of the same width.

`--beside` runs the same replays with the draftquant of another Python and tells the processor's
seconds of both, of whole processes, with nothing kept from one to the next; they are told to differ
if their counts do.
"""

import argparse
import json
import sys
import tempfile
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

DTYPES = ("float32", "bfloat16")
CHILD = "import sys; from draftquant.scripts.dev.replay_jobs import run_job; run_job(sys.argv[1])"
COLUMNS = ("tokens", "seconds", "tokens/s", "ratio", "CPU s", "of GEMM", "accepted", "load s",
           "peak GB", "estimate GB")  # fmt: skip
SIZES = (1, None)


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
        cpu_seconds: of the whole process, of all its threads.
        share_of_gemm: how much of its time a replay would take at the rate of one large product.
        acceptance_length: of the first draft.
        peak_rss_bytes: of the process. estimated_bytes: of the replay, by its headers.
        peak_gpu_bytes: None on a CPU.
        error: last lines of stderr where it failed; its figures then mean nothing.
    """

    name: str
    tokens: int = 0
    seconds: float = 0.0
    load_seconds: float = 0.0
    cpu_seconds: float = 0.0
    share_of_gemm: float | None = None
    acceptance_length: float | None = None
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


def plan_jobs(
    inputs: Inputs,
    *,
    device: str,
    tokens: int,
    prompts: int,
    record: bool,
    num_draft_tokens: Sequence[int] = (3,),
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[int | None] = SIZES,
) -> list[Job]:
    """Both dtypes, one prompt at a time and together."""
    replay = {"drafts": [*map(str, inputs.drafts)], "traces": str(inputs.traces), "device": device}
    jobs = [
        Job(
            name=f"replay {dtype}, K = {k}, {_together(size)}",
            kind="replay",
            options=replay | {"dtype": dtype, "batch_size": size, "num_draft_tokens": k},
        )
        for k in num_draft_tokens
        for dtype in dtypes
        for size in sizes
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
    return Measurement(
        name=job.name, cpu_seconds=taken.cpu_seconds, peak_rss_bytes=taken.peak_bytes, **found
    )


def seconds_beside(job: Job, python: str) -> tuple[float, float, bool]:
    """Processor's seconds of a replay by another draftquant and by this; whether counts are equal.

    Raises:
        BenchError: one of them failed.
    """
    options = job.options
    words = ["replay", *options["drafts"], "--traces", options["traces"], "--json", "-k",
             str(options["num_draft_tokens"]), "--dtype", options["dtype"],
             "--device", options["device"]]  # fmt: skip
    if options["batch_size"] is not None:
        words += ["--batch-size", str(options["batch_size"])]
    took, said = [], []
    for each in (python, sys.executable):
        with tempfile.TemporaryDirectory() as kept:
            call = ("env", f"DRAFTQUANT_CACHE={kept}", each, "-m", "draftquant.scripts.cli", *words)
            taken = run_measured(*call)
        if taken.status:
            raise BenchError(each, " / ".join(taken.last_lines), fix="run it there by hand")
        took.append(taken.cpu_seconds)
        said.append(taken.stdout)
    return took[0], took[1], said[0] == said[1]


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
            share, length = m.share_of_gemm, m.acceptance_length
            estimate = m.estimated_bytes
            found.row(
                m.name,
                f"{m.tokens:,}",
                f"{m.seconds:.1f}",
                f"{rate:.1f}",
                f"{rate / first:.2f}" if first else "",
                f"{m.cpu_seconds:.1f}",
                "" if share is None else f"{share:.0%}",
                "" if length is None else f"{length:.2f}",
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
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt, at least 48")
    parser.add_argument("-k", "--num-draft-tokens", type=int, nargs="+", default=[3])
    parser.add_argument("--dtype", nargs="+", default=[*DTYPES], choices=DTYPES)
    parser.add_argument("--batch-size", type=int, nargs="+", choices=(0, 1), default=[1, 0],
                        help="1 = one prompt at a time, 0 = prompts together")  # fmt: skip
    parser.add_argument("--beside", metavar="PYTHON", help="of another draftquant to compare with")
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
    jobs = plan_jobs(
        inputs,
        device=chosen.device,
        tokens=chosen.tokens,
        prompts=chosen.prompts,
        record=chosen.record,
        num_draft_tokens=chosen.num_draft_tokens,
        dtypes=chosen.dtype,
        sizes=[size or None for size in chosen.batch_size],
    )
    if chosen.beside is not None:
        return _beside([job for job in jobs if job.kind == "replay"], chosen.beside, chosen.json)
    measurements = []
    for job in jobs:
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


def _beside(jobs: Sequence[Job], python: str, as_json: bool) -> int:
    """Print the seconds of both; 1 where counts differ or one failed."""
    rows = []
    found = table("CPU seconds of whole processes", "run", "other", "this", "ratio", "counts",
                  right=("other", "this", "ratio"))  # fmt: skip
    for job in jobs:
        stderr().line(job.name)
        try:
            other, this, equal = seconds_beside(job, python)
        except BenchError as exc:
            print_error(exc)
            return 1
        rows.append({"name": job.name, "other": other, "this": this, "equal": equal})
        said = "equal" if equal else "differ"
        found.row(job.name, f"{other:.1f}", f"{this:.1f}", f"{other / this:.2f}", said)
    if as_json:
        print_json(rows)
    else:
        print_table(found)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
