"""What each format and algorithm costs in accepted tokens, on the trained pairs.

    python -m benchmarks.quality WORKDIR [--pair tests/pairs/eagle3-llama ...]
        [--recipe int4-channel ...] [--algorithm recipe mse gptq quark:gptq ...] [--json]

`recipe` is the algorithm that the recipe itself names, by its own backend. Another one is computed
by backend torch, or by the one that precedes it. Recipes may be files.
Codes that depend on inputs come from the 48 calibration prompts of the pair, and drafts are
judged by the rules of the gate on its 96 gate prompts, greedily. The table also has the divergence
of what a draft proposes from what the BF16 draft proposes: the acceptance length counts whole
tokens, so two drafts differ in it by chance; the divergence looks at all probabilities.
Every draft is quantized in a separate process, whose CPU time and memory are measured. Traces and
drafts stay in WORKDIR and are used again.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftquant.recipes import load_recipe
from draftquant.scripts.dev import PAIRS
from draftquant.scripts.frame.console import stderr
from draftquant.validate.judging.judgement import GateReport
from draftquant.validate.report.document import read_report

from .command_line import benchmark_parser, run_benchmark
from .measured_process import BenchError, draftquant

if TYPE_CHECKING:
    from draftquant.calibration.traces.trace_folder import TraceFolder
    from draftquant.quantize.stored.loading import LoadedDraft
    from torch import Tensor

NEW_TOKENS = 128
PAIR_NAMES = ("eagle3-llama", "eagle3-mla", "dflash")
RECIPES = ("int4-channel", "int4-group128", "fp8-ptpc", "blackwell-nvfp4", "mi355-mxfp4")
AS_SHIPPED = "recipe"
JUDGED = (0, 1, 3)
"""Exit codes of a gate that judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What quantizing took, in a separate process.

    Attributes:
        weight_error: root of the relative squared error, mean over the linears.
    """

    cpu_seconds: float
    peak_bytes: int
    weight_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantized draft.

    Attributes:
        divergence: KL(BF16 draft ‖ draft) in nats, mean over rows and depths of the greedy text.
        change, lower, upper: of the acceptance length against BF16, as fractions; bounds one-sided
            at 95 %.
    """

    pair: str
    recipe: str
    algorithm: str
    divergence: float
    acceptance_length: float
    change: float
    lower: float
    upper: float
    verdict: str
    cost: Cost


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `run_benchmark`."""
    parser = benchmark_parser("quality", "Measure what quantizing costs in accepted tokens.")
    shipped = [PAIRS / name for name in PAIR_NAMES]
    parser.add_argument("--pair", type=Path, nargs="+", default=shipped, help="trained pairs")
    parser.add_argument("--recipe", nargs="+", default=RECIPES)
    parser.add_argument("--algorithm", nargs="+", default=[AS_SHIPPED])
    return run_benchmark(parser, arguments, _measure, _columns)


def _measure(asked: argparse.Namespace) -> list[Row]:
    rows = []
    for pair in asked.pair:
        if not (pair / "training.json").is_file():
            raise BenchError(pair, "is no trained pair", fix="give one of tests/pairs")
        (asked.workdir / pair.name).mkdir(exist_ok=True)
        for recipe in asked.recipe:
            for algorithm in asked.algorithm:
                rows.append(_row(pair, asked.workdir / pair.name, recipe, algorithm))
                stderr().line(", ".join(_columns(rows[-1]).values()))
    return rows


def _row(pair: Path, work: Path, recipe: str, algorithm: str) -> Row:
    out, cost = _quantized(pair, work, recipe, algorithm)
    traces, report = _recorded(pair, work, "prompts"), out.with_name(f"{out.name}-gate.json")
    if not report.exists():
        folders = (str(pair / "draft"), str(out), "--traces", str(traces))
        draftquant("gate", *folders, "--report", str(report), judged=JUDGED)
    found = read_report(report).judgement
    if not isinstance(found, GateReport) or found.change is None:
        raise BenchError(report, "has no change", fix="remove it, or use another WORKDIR")
    return Row(
        pair=pair.name,
        recipe=Path(recipe).stem,
        algorithm=algorithm,
        divergence=divergence(pair / "draft", out, traces),
        acceptance_length=found.candidate.mean_acceptance_length,
        change=found.change.relative_change,
        lower=math.expm1(found.change.lower),
        upper=math.expm1(found.change.upper),
        verdict=found.verdict,
        cost=cost,
    )


def _quantized(pair: Path, work: Path, recipe: str, algorithm: str) -> tuple[Path, Cost]:
    out = work / f"{Path(recipe).stem}-{algorithm.replace(':', '-')}"
    took = out.with_name(f"{out.name}.json")
    if not out.exists():
        seen = ("--traces", str(_recorded(pair, work, "calibration")))
        taken = draftquant(
            "quantize", str(pair / "draft"), "--recipe", recipe, "--json", *chosen(algorithm),
            *(seen if is_calibrated(recipe, algorithm) else ()), "--out", str(out),
        )  # fmt: skip
        errors = [
            x["relative_l2_error"] for x in json.loads(taken.stdout)["verification"]["linears"]
        ]
        cost = Cost(
            cpu_seconds=taken.cpu_seconds,
            peak_bytes=taken.peak_bytes,
            weight_error=sum(errors) / len(errors),
        )
        took.write_text(json.dumps(asdict(cost)), encoding="utf-8")
    return out, Cost(**json.loads(took.read_text(encoding="utf-8")))


def _recorded(pair: Path, work: Path, prompts: str) -> Path:
    """Traces of the pair's target on `prompts` or `calibration`."""
    out = work / f"traces-{prompts}"
    if not out.exists():
        draftquant(
            "record", "--target", str(pair / "target"), "--draft", str(pair / "draft"), "--tables",
            "--prompts", str(pair / f"{prompts}.jsonl"), "--max-new-tokens", str(NEW_TOKENS),
            "--out", str(out),
        )  # fmt: skip
    return out


def chosen(algorithm: str) -> tuple[str, ...]:
    """The options that choose it."""
    if algorithm == AS_SHIPPED:
        return ()
    backend, _, name = algorithm.rpartition(":")
    return ("--algorithm", name, "--backend", backend or "torch")


def is_calibrated(recipe: str, algorithm: str) -> bool:
    """Whether prompts affect the result."""
    shipped, name = load_recipe(recipe), algorithm.rpartition(":")[2]
    if name == AS_SHIPPED:
        return shipped.needs_input_scales or shipped.algorithm.rounding != "nearest"
    return shipped.needs_input_scales or name not in ("absmax", "mse")


def divergence(reference: Path, draft: Path, traces: Path) -> float:
    """KL(reference ‖ draft) in nats, the mean over every row and depth of every prompt."""
    import torch
    from draftquant.calibration.passes.on_traces import chosen_num_draft_tokens
    from draftquant.calibration.traces.trace_folder import TraceFolder
    from draftquant.quantize.stored.loading import load_draft

    opened = TraceFolder.open(traces)
    both = [load_draft(folder, shared=opened.tables(None)) for folder in (reference, draft)]
    depths, total, count = chosen_num_draft_tokens(None, both), 0.0, 0
    with torch.inference_mode():
        for p, q in zip(*(_proposed(one, opened, depths) for one in both), strict=True):
            total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            count += p.shape[0] * p.shape[1]
    return total / count


def _proposed(draft: "LoadedDraft", traces: "TraceFolder", depths: int) -> Iterator["Tensor"]:
    """[R, D, vocabulary] logarithms of probabilities of every pass along every prompt."""
    from draftquant.calibration.passes.draft_inputs import first_hidden
    from draftquant.quantize.drafts.forward import whole_rows

    for trace in traces:
        for one in draft.forward.passes(
            first_hidden(draft, traces, trace)[None],
            trace.token_ids[None],
            rows=whole_rows(trace.num_tokens, depths, first_row=trace.prompt_length - 1),
            num_draft_tokens=depths,
        ):
            yield draft.forward.logits(one.hidden[0]).float().log_softmax(-1)


def _columns(row: Row) -> dict[str, str]:
    return {
        "draft": f"{row.pair} {row.recipe} {row.algorithm}",
        "weight error": f"{row.cost.weight_error:.4f}",
        "KL": f"{row.divergence:.5f}",
        "length": f"{row.acceptance_length:.4f}",
        "change": f"{row.change:+.2%} ({row.lower:+.2%}, {row.upper:+.2%}) {row.verdict}",
        "CPU s": f"{row.cost.cpu_seconds:.1f}",
        "MB": f"{row.cost.peak_bytes / 1e6:,.0f}",
    }


if __name__ == "__main__":
    sys.exit(main())
