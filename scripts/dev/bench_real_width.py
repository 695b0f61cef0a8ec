"""The recommended way from end to end on a draft of a published shape: time and memory of a stage.

    python -m draftquant.scripts.dev.bench_real_width WORKDIR [--draft NAME] [--divide 1]
        [--prompts 64] [--tokens 256] [--recipe int4-channel-gptq] [--cores 2]
        [--scaling 4] [--json]

A draft of random weights and two sets of traces that fit it are made once and stay in WORKDIR (see
`real_shapes.traces`). Then the commands of README run on them, each in a process of its own:
calibrate, quantize, verify, gate; and a second candidate, for which the baseline is replayed
already. Acceptance is that of the made text: it shows that every stage does its work, and says
nothing about drafts that were trained.

`--scaling N` times the same stages of a draft N times narrower with one core and with all cores of
this run, and multiplies the times of the whole draft by what 16 cores would change if each doubling
went on to change them as the measured ones do. Such times are marked as extrapolated.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..console import print_table, stderr, stdout, table
from .command_lines import benchmark_parser, run_benchmark
from .measured_process import BenchError, run_measured
from .real_shapes.drafts import DEFAULT_DRAFT, REAL_DRAFTS
from .real_shapes.generate import write_real_shape_draft, write_target
from .real_shapes.traces import TraceSize, write_traces

CALIBRATION_SEED, GATE_SEED = 1, 2
MANY_CORES = 16
FIRST, SECOND = "int4-channel-gptq", "int4-channel"
ON_CORES = """
import os, sys
cores = int(sys.argv[1])
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
os.environ["OMP_NUM_THREADS"] = str(cores)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one command took.

    Attributes:
        wall_seconds, cpu_seconds: of its process, start-up included.
        peak_bytes: resident memory of its process.
        parts: stage of the command -> wall seconds, as the command itself reports them.
        result: what it said.
        exponent: e in wall seconds ~ cores^-e, where it was measured.
    """

    name: str
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    parts: Mapping[str, float] = field(default_factory=dict)
    result: str = ""
    exponent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One draft, its traces, and what is made of them; all in one folder."""

    folder: Path
    name: str
    divide: int
    prompts: int
    tokens: int

    @property
    def draft(self) -> Path:
        """The BF16 draft."""
        return self.folder / f"{self.name}{self._smaller}"

    @property
    def target(self) -> Path:
        """Whose tables the traces carry, where the draft has none."""
        return self.folder / f"{self.name}{self._smaller}-target"

    @property
    def lacks_tables(self) -> bool:
        """Embedding and head are the target's."""
        draft = REAL_DRAFTS[self.name]
        return "embed_tokens" not in draft.shapes(draft.config(self.divide))

    def traces(self, seed: int) -> Path:
        """A set of traces."""
        size = f"{self.prompts}x{self.tokens}"
        return self.folder / f"{self.name}{self._smaller}-traces-{size}-{seed}"

    def out(self, recipe: str) -> Path:
        """A quantized draft, made by this run and deleted at its end."""
        return self.folder / f"{self.name}{self._smaller}-{recipe}"

    @property
    def _smaller(self) -> str:
        return "" if self.divide == 1 else f"-{self.divide}"


def make_inputs(work: Work) -> None:
    """Make the draft and the traces that are not there yet, each in a process of its own.

    Raises:
        DraftQuantError: a folder could not be written.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as other:
        if not work.draft.exists():
            other.submit(
                write_real_shape_draft, work.draft, draft=work.name, divide=work.divide
            ).result()
        target = work.target if work.lacks_tables else None
        if target is not None and not target.exists():
            other.submit(write_target, target, work.name, divide=work.divide).result()
        for seed in (CALIBRATION_SEED, GATE_SEED):
            if not work.traces(seed).exists():
                size = TraceSize(prompts=work.prompts, tokens=work.tokens, seed=seed)
                out = work.traces(seed)
                other.submit(write_traces, work.draft, out, size, target=target).result()


def run_stages(work: Work, recipe: str, *, cores: int) -> list[Stage]:
    """Quantize, verify and gate by two recipes, and delete what they wrote.

    Raises:
        BenchError: a command failed, or an output is in the way.
    """
    draft, calibration, judged = work.draft, work.traces(CALIBRATION_SEED), work.traces(GATE_SEED)
    stages = []
    outs = [work.out(one) for one in (recipe, SECOND)]
    cache = work.folder / "cache"
    for path in (*outs, cache):
        if path.exists():
            raise BenchError(str(path), "is there already", fix="move it, or use another WORKDIR")
    os.environ["DRAFTQUANT_CACHE"] = str(cache)
    try:
        for one, out, calibrated in ((recipe, outs[0], True), (SECOND, outs[1], False)):
            asked = ("--recipe", one, "--out", str(out))
            traces = ("--traces", str(calibration)) if calibrated else ()
            judging = ("--traces", str(judged), "--dtype", "bfloat16")
            stages += [
                _stage(f"quantize {one}", cores, "quantize", str(draft), *asked, *traces),
                _stage(f"verify {one}", cores, "verify", str(out), "--against", str(draft)),
                _stage(f"gate {one}", cores, "gate", str(draft), str(out), *judging),
            ]
    finally:
        for path in (*outs, cache):
            if path.exists():
                shutil.rmtree(path)
    return stages


def exponents(one: Sequence[Stage], many: Sequence[Stage], cores: int) -> list[float]:
    """Of each stage, e in wall seconds ~ cores^-e, between one core and `cores`."""
    return [
        math.log(alone.wall_seconds / together.wall_seconds) / math.log(cores)
        for alone, together in zip(one, many, strict=True)
    ]


def _stage(name: str, cores: int, *arguments: str) -> Stage:
    """One command, on the first so many cores.

    Raises:
        BenchError: it failed; a verdict against the draft is none.
    """
    command = (sys.executable, "-c", ON_CORES, str(cores), "-m", "draftquant.scripts.cli")
    stderr().line(f"{name}, {cores} cores")
    taken = run_measured(*command, *arguments, "--json")
    if taken.status not in {0, 1, 3} or not taken.stdout.startswith("{"):
        raise BenchError(name, f"exit code {taken.status}", details=taken.last_lines,
                         fix="see what the command says")  # fmt: skip
    said = json.loads(taken.stdout)
    return Stage(
        name=name,
        wall_seconds=taken.wall_seconds,
        cpu_seconds=taken.cpu_seconds,
        peak_bytes=taken.peak_bytes,
        parts=said.get("seconds") or {},
        result=_result(said),
    )


def _result(said: Mapping[str, Any]) -> str:
    """The verdict with its figures, or what became of the bytes."""
    if "verdict" in said:
        lengths = [
            f"{said[one]['mean_acceptance_length']:.4f}" for one in ("baseline", "candidate")
        ]
        change = said["change"]
        return (
            f"{said['verdict']}: {' -> '.join(lengths)}, {said['relative_change']:+.2%}"
            f" ({change['lower']:+.2%}, {change['upper']:+.2%})"
        )
    if "ok" in said:
        return "verified" if said["ok"] else "WRONG"
    return f"{said['bytes_before'] / 1e9:.2f} -> {said['bytes_after'] / 1e9:.2f} GB"


def print_stages(asked: argparse.Namespace, stages: Sequence[Stage]) -> None:
    """One row for each command, and under it one for each of its stages."""
    cores = asked.cores
    extrapolated = (f"{MANY_CORES} cores, s *",) if asked.scaling else ()
    columns = ("wall s", "CPU s", "peak GB", *extrapolated)
    found = table(f"{cores} cores", "stage", *columns, "result", right=columns)
    for stage in stages:
        many = []
        if stage.exponent is not None:
            seconds = stage.wall_seconds * (MANY_CORES / cores) ** -stage.exponent
            many = [f"{seconds:.0f} (e = {stage.exponent:.2f})"]
        found.row(stage.name, f"{stage.wall_seconds:.1f}", f"{stage.cpu_seconds:.1f}",
                  f"{stage.peak_bytes / 1e9:.2f}", *many, stage.result)  # fmt: skip
        for part, seconds in stage.parts.items():
            found.row(f"  {part}", f"{seconds:.1f}", *[""] * (len(columns) - 1), "")
    print_table(found)
    if extrapolated:
        stdout().line(
            f"* extrapolated: wall seconds x ({MANY_CORES} / {cores})^-e, where e was measured"
            " between one core and these on a narrower draft"
        )


def _parser() -> argparse.ArgumentParser:
    """The folder needs room for draft and traces: 20 GB."""
    about = "Calibrate, quantize, verify and gate a draft of a published shape."
    parser = benchmark_parser("bench_real_width", about)
    parser.add_argument("--draft", default=DEFAULT_DRAFT, choices=REAL_DRAFTS)
    parser.add_argument("--divide", type=int, default=1, help="a smaller draft, for a quick try")
    parser.add_argument("--recipe", default=FIRST, help="of the first candidate")
    parser.add_argument("--prompts", type=int, default=64, help="of each of the two sets of traces")
    parser.add_argument("--tokens", type=int, default=256, help="of each prompt")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scaling", type=int, help="also a draft so many times narrower")
    return parser


def _measure(asked: argparse.Namespace) -> list[Stage]:
    work = Work(
        folder=asked.workdir,
        name=asked.draft,
        divide=asked.divide,
        prompts=asked.prompts,
        tokens=asked.tokens,
    )
    asked.workdir.mkdir(parents=True, exist_ok=True)
    make_inputs(work)
    stages = run_stages(work, asked.recipe, cores=asked.cores)
    if asked.scaling is None:
        return stages
    small = dataclasses.replace(work, divide=asked.scaling)
    make_inputs(small)
    alone, together = (run_stages(small, asked.recipe, cores=n) for n in (1, asked.cores))
    slopes = exponents(alone, together, asked.cores)
    return [dataclasses.replace(one, exponent=e) for one, e in zip(stages, slopes, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when everything was measured, 2 when something failed.
    """
    return run_benchmark(_parser(), arguments, _measure, print_stages)


if __name__ == "__main__":
    sys.exit(main())
