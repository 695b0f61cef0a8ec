"""Time and memory of GPTQ and of learned rounding, on a draft of real shape.

    python -m draftquant.scripts.dev.bench_rounding WORKDIR [--draft NAME] [--divide 4]
        [--recipe int4-channel] [--prompts 32] [--tokens 64] [--steps 4] [--device cpu] [--json]

Weights and text are random: what is found is worth nothing, the work is that of a trained draft.
GPTQ is one `draftquant quantize`. Of learned rounding some steps are timed and not a hundred, which
take so many times as long; before and after them lie two looks at the prompts that are held back.
Each measurement is a process of its own. Draft and traces stay in WORKDIR.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..console import print_table, table
from . import REAL_SHAPES
from .command_lines import benchmark_parser, run_benchmark
from .measured_process import BenchError, Taken, measured

JOB = "import sys; from draftquant.scripts.dev.bench_rounding import run_job; run_job(sys.argv[1])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One algorithm.

    Attributes:
        what: "gptq", or "learned" with its steps.
        seconds: of the wall; cpu_seconds of all cores. Of the whole process.
        step_seconds: of one step of learning, None for GPTQ.
    """

    what: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    step_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is measured on."""

    draft: Path
    traces: Path
    recipe: str
    device: str


def make_shape(asked: argparse.Namespace) -> Shape:
    """Make what is not in WORKDIR yet.

    Raises:
        BenchError: a command failed.
    """
    smaller = "" if asked.divide == 1 else f"-{asked.divide}"
    draft = asked.workdir / f"{asked.draft}{smaller}"
    traces = asked.workdir / f"traces{smaller}-{asked.prompts}x{asked.tokens}"
    asked.workdir.mkdir(parents=True, exist_ok=True)
    if not draft.exists():
        divide = ("--divide", str(asked.divide))
        measured("draft", "-m", REAL_SHAPES, str(draft), "--draft", asked.draft, *divide)
    if not traces.exists():
        options = {"draft": str(draft), "out": str(traces), "prompts": asked.prompts}
        _job("traces", **options, tokens=asked.tokens)
    return Shape(draft=draft, traces=traces, recipe=asked.recipe, device=asked.device)


def gptq_row(shape: Shape, work: Path) -> Row:
    """`draftquant quantize --algorithm gptq`; the output is removed."""
    out = work / "gptq"
    shutil.rmtree(out, ignore_errors=True)
    taken = measured(
        "gptq",
        *("-m", "draftquant.scripts.cli", "quantize", str(shape.draft), "--recipe", shape.recipe),
        *("--algorithm", "gptq", "--traces", str(shape.traces), "--device", shape.device),
        *("--out", str(out)),
    )
    shutil.rmtree(out)
    return _row("gptq", taken)


def learned_row(shape: Shape, work: Path, steps: int) -> Row:
    """Some steps of learning."""
    taken = _job(
        "learned",
        draft=str(shape.draft),
        traces=str(shape.traces),
        recipe=shape.recipe,
        device=shape.device,
        steps=steps,
        out=str(work / "learned"),
    )
    step_seconds = json.loads(taken.stdout.splitlines()[-1])["step_seconds"]
    return _row(f"learned, {steps} steps", taken, step_seconds)


def _row(what: str, taken: Taken, step_seconds: float | None = None) -> Row:
    return Row(
        what=what,
        seconds=taken.wall_seconds,
        cpu_seconds=taken.cpu_seconds,
        peak_bytes=taken.peak_bytes,
        step_seconds=step_seconds,
    )


def _job(kind: str, **options: object) -> Taken:
    return measured(kind, "-c", JOB, json.dumps({"kind": kind, **options}))


def run_job(described: str) -> None:
    """Do one job, {"kind", ...} as JSON, and print its figures as JSON."""
    job = json.loads(described)
    kind = job.pop("kind")
    if kind == "traces":
        from .replay_jobs import JOBS

        print(json.dumps(JOBS["make traces"](**job)))
        return
    print(json.dumps({"step_seconds": _step_seconds(**job)}))


def _step_seconds(
    *, draft: str, traces: str, recipe: str, device: str, steps: int, out: str
) -> float:
    """Of one step, between the first and the last look at the prompts that are held back."""
    from ...calibration.linear_inputs.static_scales import calibrated_scales
    from ...calibration.passes.devices import resolve_device
    from ...calibration.rounding.learn import learned_codes
    from ...calibration.rounding.learning_settings import LearningSettings
    from ...calibration.rounding.validation import LearningProgress
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.quantization_plan import make_plan
    from ...quantize.stored.loading import load_draft
    from ...recipes import load_recipe
    from ...validate.counting.trace_replay import chosen_num_draft_tokens
    from ..api.opening import open_draft, with_algorithm

    _, headers = open_draft(draft)
    plan = make_plan(with_algorithm(load_recipe(recipe), "learned"), headers)
    opened = TraceFolder.open(Path(traces))
    loaded = load_draft(Path(draft), device=resolve_device(device), compact=True)
    count = chosen_num_draft_tokens(None, [loaded])
    static = None
    if plan.recipe.needs_input_scales:
        static = calibrated_scales(plan, loaded, opened, num_draft_tokens=count)
    ends: list[float] = []

    def note(_progress: LearningProgress) -> None:
        ends.append(time.perf_counter())

    settings = LearningSettings(steps=steps + 1, validate_every=steps + 1)
    with learned_codes(
        plan, loaded, opened, Path(out), num_draft_tokens=count, static=static, settings=settings,
        on_progress=note,
    ):  # fmt: skip
        return (ends[-2] - ends[0]) / (steps - 1)


def print_rows(asked: argparse.Namespace, rows: Sequence[Row]) -> None:
    """One table."""
    divided = "" if asked.divide == 1 else f" / {asked.divide}"
    title = f"{asked.draft}{divided}, {asked.recipe}, {asked.prompts} prompts"
    columns = ("wall s", "CPU s", "s per step", "peak GB")
    found = table(title, "algorithm", *columns, right=columns)
    for row in rows:
        step = "" if row.step_seconds is None else f"{row.step_seconds:.1f}"
        peak = f"{row.peak_bytes / 1e9:.2f}"
        found.row(row.what, f"{row.seconds:.0f}", f"{row.cpu_seconds:.0f}", step, peak)
    print_table(found)


def measured_rows(asked: argparse.Namespace) -> list[Row]:
    """GPTQ, and learned rounding where steps of it are asked for.

    Raises:
        BenchError: something could not be made.
    """
    if asked.steps not in (0, *range(3, 1000)):
        raise BenchError("--steps", f"expected 0 or 3 and more, got {asked.steps}",
                         fix="the first one is not counted")  # fmt: skip
    shape = make_shape(asked)
    rows = [gptq_row(shape, asked.workdir)]
    if asked.steps:
        rows.append(learned_row(shape, asked.workdir, asked.steps))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = benchmark_parser("bench_rounding", __doc__)
    parser.add_argument("--draft", default="kimi-k2.5-eagle3")
    parser.add_argument("--divide", type=int, default=4, help="so many times smaller widths")
    parser.add_argument("--recipe", default="int4-channel")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt and its text")
    parser.add_argument("--steps", type=int, default=4, help="of learning; 0 leaves it out")
    parser.add_argument("--device", default="cpu")
    return run_benchmark(parser, arguments, measured_rows, print_rows)


if __name__ == "__main__":
    sys.exit(main())
