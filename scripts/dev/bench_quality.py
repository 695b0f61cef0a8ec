"""What each format and algorithm costs in accepted tokens, on trained pairs and fresh prompts.

    python -m draftquant.scripts.dev.bench_quality WORKDIR [--pair tests/pairs/eagle3-llama ...]
        [--recipe int4-channel ...] [--algorithm gptq quark:gptq ...] [--prompts 240]
        [--calibrate-by all 12 256 modules ...] [--greedy-only] [--json]

An algorithm is computed by backend torch, or by the one that stands before it. It corrects for the
rounding of inputs unless `-uncorrected` stands behind it. `recipe` stands for what the recipe
itself says, its backend included. Recipes may be files.
Of each pair the gate prompts are the shipped ones and so many more, from files that neither
training nor calibration saw. Every draft is quantized by a process of its own, whose CPU time and
memory are taken, and judged by the gate's rules, also on text drawn at temperature 1 with proposals
drawn likewise: what is compared there is the expected number of accepted tokens. Beside that stands
the divergence of what it proposes from what the BF16 draft proposes on the greedy text. Traces,
drafts and the replay of the BF16 draft stay in WORKDIR and are used again.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...validate.counting.estimand import DraftSampling
from ..console import print_table, stderr, table
from .command_lines import add_pairs, benchmark_parser, run_benchmark
from .measured_process import BenchError
from .quality_divergence import Divergence
from .quality_traces import Calibration, PairTraces, draftquant

RECIPES = ("int4-channel", "int4-group128", "hopper-w4a8", "blackwell-nvfp4", "mi355-mxfp4")
ALGORITHMS = ("absmax", "mse", "gptq", "learned")
AS_SHIPPED, UNCORRECTED = "recipe", "-uncorrected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Of the acceptance length against BF16, as fractions; bounds one-sided at 95 %."""

    relative: float
    lower: float
    upper: float
    verdict: str

    def __str__(self) -> str:
        bounds = f"({self.lower:+.2%}, {self.upper:+.2%})"
        return f"{self.relative:+.2%} {bounds} {self.verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantized draft.

    Attributes:
        algorithm: its backend before it, but for torch.
        weight_error: root of the relative squared error, mean over the linears.
        agreement: share of first proposals equal to those of BF16.
        divergence: KL(BF16 draft ‖ draft) in nats, mean over rows and depths of the greedy text.
        greedy, drawn: on greedy text, and on text of temperature 1; None = not asked for.
        cpu_seconds, peak_bytes: of `draftquant quantize`, a process of its own.
    """

    pair: str
    recipe: str
    algorithm: str
    weight_error: float
    agreement: float
    divergence: float
    acceptance_length: float
    greedy: Change
    drawn: Change | None
    cpu_seconds: float
    peak_bytes: int


class Bench:
    """One pair: its prompts, its traces, and the drafts that are made of it."""

    def __init__(
        self, pair: Path, work: Path, num_prompts: int, *, greedy_only: bool = False
    ) -> None:
        self.pair, self.work = pair, work / pair.name
        self.draft = pair / "draft"
        self.traces = PairTraces(pair, self.work, num_prompts)
        self._greedy_only = greedy_only
        self._divergences: dict[Path, Divergence] = {}

    def rows(
        self, recipes: Sequence[str], algorithms: Sequence[str], by: Sequence[Calibration]
    ) -> Iterator[Row]:
        """Every recipe by every algorithm; those that look at inputs by each set of prompts.

        Raises:
            BenchError: a command failed.
        """
        for recipe in recipes:
            for algorithm in algorithms:
                looks = is_calibrated(recipe, algorithm)
                for each in by if looks else by[:1]:
                    yield self._row(recipe, algorithm, each, looks)

    def _row(self, recipe: str, algorithm: str, by: Calibration, looks: bool) -> Row:
        name = f"{Path(recipe).stem}-{algorithm.replace(':', '-')}{by.suffix if looks else ''}"
        out, took = self.work / name, self.work / f"{name}.json"
        if not out.exists():
            taken = draftquant(
                "quantize",
                *(str(self.draft), "--recipe", recipe, "--json", *chosen(algorithm)),
                *(("--traces", str(self.traces.calibration(by))) if looks else ()),
                *("--out", str(out)),
            )
            linears = json.loads(taken.stdout)["verification"]["linears"]
            errors = [one["relative_l2_error"] for one in linears]
            figures = {
                "cpu_seconds": taken.cpu_seconds,
                "peak_bytes": taken.peak_bytes,
                "weight_error": sum(errors) / len(errors),
            }
            took.write_text(json.dumps(figures), encoding="utf-8")
        figures = json.loads(took.read_text(encoding="utf-8"))
        gate, drawn = self.traces.gate(by), None
        greedy, agreement, length = self._judged(out, gate, "greedy")
        if not self._greedy_only:
            drawn, _, _ = self._judged(out, self.traces.drawn(by), "probabilistic")
        return Row(
            pair=self.pair.name,
            recipe=Path(recipe).stem,
            algorithm=f"{algorithm} {by}".strip() if looks else algorithm,
            agreement=agreement,
            divergence=self._divergence(out, gate),
            acceptance_length=length,
            greedy=greedy,
            drawn=drawn,
            **figures,
        )

    def _judged(
        self, out: Path, traces: Path, sampling: DraftSampling
    ) -> tuple[Change, float, float]:
        """The change, the agreement of first proposals and the acceptance length."""
        from ...calibration.traces.trace_folder import TraceFolder
        from ...quantize.files.result_cache import ResultCache
        from ...quantize.stored.loading import load_draft
        from ...validate.counting.replay_cache import ReplayCache
        from ...validate.counting.trace_replay import chosen_num_draft_tokens, replay_drafts
        from ...validate.judging.judgement import judge
        from ...validate.judging.policy import POLICIES

        opened = TraceFolder.open(traces)
        drafts = [load_draft(f, shared=opened.tables(None)) for f in (self.draft, out)]
        count = chosen_num_draft_tokens(None, drafts)
        kept = ResultCache(folder=self.work / "replays", on_warning=stderr().line)
        baseline, candidate = replay_drafts(
            drafts,
            opened,
            num_draft_tokens=count,
            draft_sampling=sampling,
            cache=ReplayCache(results=kept),
        )
        report = judge(baseline, candidate, POLICIES["release"])
        if report.change is None:
            raise BenchError(str(out), report.reason, fix="record more prompts")
        found = report.change
        change = Change(
            relative=found.relative_change,
            lower=math.expm1(found.lower),
            upper=math.expm1(found.upper),
            verdict=report.verdict,
        )
        return change, candidate.first_step.share, report.candidate.mean_acceptance_length

    def _divergence(self, out: Path, traces: Path) -> float:
        from ...calibration.traces.trace_folder import TraceFolder
        from ...quantize.stored.loading import load_draft
        from ...validate.counting.trace_replay import chosen_num_draft_tokens

        opened = TraceFolder.open(traces)
        if traces not in self._divergences:
            reference = load_draft(self.draft, shared=opened.tables(None))
            count = chosen_num_draft_tokens(None, [reference])
            self._divergences[traces] = Divergence(reference, opened, count)
        return self._divergences[traces].mean(load_draft(out, shared=opened.tables(None)))


def chosen(algorithm: str) -> tuple[str, ...]:
    """The options that choose it."""
    if algorithm == AS_SHIPPED:
        return ()
    backend, _, name = algorithm.rpartition(":")
    named = ("--algorithm", name.removesuffix(UNCORRECTED), "--backend", backend or "torch")
    return (*named, "--input-correction", "off") if name.endswith(UNCORRECTED) else named


def is_calibrated(recipe: str, algorithm: str) -> bool:
    """Whether prompts decide what comes out."""
    from ...recipes import load_recipe

    shipped, name = load_recipe(recipe), algorithm.rpartition(":")[2]
    if shipped.needs_input_scales:
        return True
    if name == AS_SHIPPED:
        return shipped.algorithm.rounding != "nearest"
    return name not in ("absmax", "mse")


def print_rows(rows: Sequence[Row]) -> None:
    """One table."""
    columns = (
        "weight error",
        "first token",
        "KL",
        "length",
        "change, greedy",
        "change, drawn",
        "CPU s",
        "MB",
    )
    found = table("Quality", "pair", "recipe", "algorithm", *columns, right=columns)
    for row in rows:
        found.row(
            row.pair,
            row.recipe,
            row.algorithm,
            f"{row.weight_error:.4f}",
            f"{row.agreement:.2%}",
            f"{row.divergence:.5f}",
            f"{row.acceptance_length:.4f}",
            str(row.greedy),
            str(row.drawn or ""),
            f"{row.cpu_seconds:.1f}",
            f"{row.peak_bytes / 1e6:,.0f}",
        )
    print_table(found)


def calibration_of(word: str) -> Calibration:
    """What a word of `--calibrate-by` means."""
    if word == "all":
        return Calibration()
    return Calibration(count=int(word)) if word.isdigit() else Calibration(category=word)


def measured_rows(asked: argparse.Namespace) -> list[Row]:
    """Every draft of every pair.

    Raises:
        BenchError: something could not be made.
    """
    rows = []
    by = [calibration_of(word) for word in asked.calibrate_by]
    for pair in asked.pair:
        bench = Bench(pair, asked.workdir, asked.prompts, greedy_only=asked.greedy_only)
        for row in bench.rows(asked.recipe, asked.algorithm, by):
            rows.append(row)
            found = f"{row.greedy}, KL {row.divergence:.5f}, drawn {row.drawn}"
            stderr().line(f"{row.pair} {row.recipe} {row.algorithm}: {found}")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = benchmark_parser("bench_quality", __doc__)
    add_pairs(parser)
    parser.add_argument("--recipe", nargs="*", default=RECIPES)
    parser.add_argument("--algorithm", nargs="*", default=ALGORITHMS)
    parser.add_argument("--prompts", type=int, default=240, help="beside the shipped 96")
    parser.add_argument(
        "--calibrate-by", nargs="*", default=["all"], metavar="N|C",
        help="so many calibration prompts (beyond the shipped ones fresh ones), or those of one"
        " category, which then does not judge; several one after the other (default: all)",
    )  # fmt: skip
    parser.add_argument("--greedy-only", action="store_true", help="leave drawn text out")
    return run_benchmark(parser, arguments, measured_rows, lambda _, rows: print_rows(rows))


if __name__ == "__main__":
    sys.exit(main())
