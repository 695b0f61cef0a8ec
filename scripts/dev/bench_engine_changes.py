"""What a draft with FP4 weights would gain if the engine rounded its inputs otherwise.

    python -m draftquant.scripts.dev.bench_engine_changes WORKDIR
        [--pair tests/pairs/eagle3-llama ...] [--weights nvfp4 mxfp4] [--engine FP8 ...]
        [--prompts 240] [--divergence-prompts 96] [--json]

For each engine the weights are found by GPTQ along the inputs as that engine would round them, and
the draft is replayed with inputs so rounded. FP8 and BF16 inputs are also tried with weights that
were found for others: what a folder gains that stays as it is. Prompts, bounds and the divergence
are those of `bench_quality`. Traces and drafts stay in WORKDIR.
"""

import argparse
import dataclasses
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...validate.counting.trace_replay import chosen_num_draft_tokens
from ..console import print_table, stderr, table
from .command_lines import add_pairs, benchmark_parser, run_benchmark
from .quality_divergence import Divergence
from .quality_traces import Calibration, PairTraces
from .served_inputs import FORMATS, READERS, Engine, ServedInputs

if TYPE_CHECKING:
    from torch import Tensor

    from ...calibration.linear_inputs.static_scales import StaticScales
    from ...quantize.quantization_plan import Plan
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.counting.draft_replay import DraftReplay

RECIPES = {"nvfp4": "blackwell-nvfp4", "mxfp4": "mi355-mxfp4"}
WIDE = {"nvfp4": "FP8", "mxfp4": "MXFP8"}
"""What one of a layer's inputs is rounded to while the others stay FP4."""
TODAYS = "today's"
FOUND_FOR_OTHERS = {"FP8": (TODAYS, "BF16"), "BF16": (TODAYS,)}
"""Inputs -> those for which weights are found that are served with them too."""


def engines(weights: str) -> list[Engine]:
    """All that are compared for weights of one format, today's first."""
    name, wide = weights.upper(), WIDE[weights]
    narrow = [kind for kind in FORMATS if kind.startswith(name)]
    one_wide = [
        Engine(name=f"{name}, but {reads} {wide}", inputs=name, but={reads: wide})
        for reads in READERS
    ]
    mlp = ("gate/up", "down")
    kept = [
        Engine(name=f"{name}, but {' and '.join(reads)} BF16", inputs=name,
               but=dict.fromkeys(reads, "BF16"))
        for reads in (mlp[1:], mlp)
    ]  # fmt: skip
    all_wide = [Engine(name=kind, inputs=kind) for kind in dict.fromkeys((wide, "FP8", "BF16"))]
    return [*(Engine(name=kind, inputs=kind) for kind in narrow), *one_wide, *kept, *all_wide]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One draft under one engine.

    Attributes:
        weights: their format. found_for: the engine for which their values were found.
        change, lower, upper: of the acceptance length against BF16, bounds one-sided at 95 %.
        divergence: mean KL(BF16 || draft) of a proposal, nats, on some of the prompts.
    """

    pair: str
    weights: str
    engine: str
    found_for: str
    acceptance_length: float
    change: float
    lower: float
    upper: float
    divergence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What drafts of one pair with weights of one format have in common.

    Attributes:
        static: of their inputs, measured; None where the format has none.
        scales: canonical name of every quantized linear -> the same as kernels have it.
    """

    plan: "Plan"
    static: "StaticScales | None"
    scales: "Mapping[str, Tensor | None]"


class Bench:
    """One pair: its traces, and the drafts that are made of it."""

    def __init__(self, pair: Path, work: Path, *, prompts: int, divergence_prompts: int) -> None:
        from ...calibration.traces.trace_folder import TraceFolder
        from ...quantize.stored.loading import load_draft

        traces = PairTraces(pair, work / pair.name, prompts)
        self._pair, self._work = pair, work / pair.name / "engines"
        self._work.mkdir(exist_ok=True)
        self._gate = TraceFolder.open(traces.gate(Calibration()))
        self._calibration = TraceFolder.open(traces.calibration(Calibration()))
        self._draft = load_draft(pair / "draft", shared=self._gate.tables(None))
        self._calibrated = load_draft(pair / "draft", shared=self._calibration.tables(None))
        self._count = chosen_num_draft_tokens(None, [self._draft])
        self._baseline = self._replayed(self._draft)
        some = self._gate.only(self._gate.manifest.prompts[:divergence_prompts])
        self._divergence = Divergence(self._draft, some, self._count)

    def rows(self, weights: str, names: Sequence[str]) -> Iterator[Row]:
        """Every engine with weights found for it, and what `FOUND_FOR_OTHERS` has."""
        prepared, compared = self._prepared(weights), engines(weights)
        named = {engine.name: engine for engine in compared} | {TODAYS: compared[0]}
        for engine in compared:
            if names and engine.name not in names:
                continue
            yield self._row(weights, prepared, engine, engine)
            for other in FOUND_FOR_OTHERS.get(engine.name, ()):
                yield self._row(weights, prepared, engine, named[other])

    def _row(self, weights: str, prepared: Prepared, engine: Engine, found_for: Engine) -> Row:
        from ...quantize.stored.loading import load_draft
        from ...validate.counting.draft_counts import distinct_prompts, recorded_pairs
        from ...validate.judging.categories import change_of

        folder = self._work / f"{weights}-{re.sub('[^a-z0-9]+', '-', found_for.name.lower())}"
        if not folder.exists():
            self._quantize(prepared, found_for, folder)
        draft = load_draft(folder, shared=self._gate.tables(None))
        served = ServedInputs(engine, prepared.scales)
        draft = dataclasses.replace(
            draft, forward=draft.family.forward(draft.geometry, draft.weights, served)
        )
        replay = self._replayed(draft)
        change = change_of(distinct_prompts(recorded_pairs(self._baseline, replay)), 0.95)
        assert change is not None  # a pair ships prompts
        return Row(
            pair=self._pair.name,
            weights=weights,
            engine=engine.name,
            found_for=found_for.name,
            acceptance_length=replay.counts.mean_acceptance_length,
            change=change.relative_change,
            lower=math.expm1(change.lower),
            upper=math.expm1(change.upper),
            divergence=self._divergence.mean(draft),
        )

    def _replayed(self, draft: "LoadedDraft") -> "DraftReplay":
        from ...validate.counting.trace_replay import replay_drafts

        (replay,) = replay_drafts([draft], self._gate, num_draft_tokens=self._count)
        return replay

    def _prepared(self, weights: str) -> Prepared:
        import torch

        from ...calibration.linear_inputs.static_scales import calibrated_scales
        from ...quantize.drafts import read_draft
        from ...quantize.files.checkpoint import Checkpoint
        from ...quantize.quantization_plan import make_plan
        from ...quantize.stored.activations import kernel_scale
        from ..api.opening import chosen_recipe

        recipe = chosen_recipe(RECIPES[weights], algorithm="gptq")
        plan = make_plan(recipe, read_draft(Checkpoint.open(self._pair / "draft")))
        static = None
        if recipe.needs_input_scales:
            static = calibrated_scales(
                plan, self._calibrated, self._calibration, num_draft_tokens=self._count
            )
        scales = {
            step.row.canonical.removesuffix(".weight"): None
            if static is None
            else kernel_scale("nvfp4", torch.tensor(static.scales[step.row.module]))
            for step in plan.quantized
        }
        return Prepared(plan=plan, static=static, scales=scales)

    def _quantize(self, prepared: Prepared, engine: Engine, out: Path) -> None:
        """Weights found along inputs as the engine rounds them."""
        from ...calibration.linear_inputs.plan_inputs import corrected_linears
        from ...calibration.linear_inputs.second_moments import MomentsAlongTraces
        from ...calibration.linear_inputs.static_scales import balanced_draft
        from ...quantize.files.hub import resolve_draft
        from ...quantize.measured import Measured
        from ...quantize.quantize_draft import quantize_draft

        plan, static = prepared.plan, prepared.static
        with tempfile.TemporaryDirectory(prefix="draftquant-engines-") as spool:
            statistics = MomentsAlongTraces(
                balanced_draft(self._calibrated, plan),
                self._calibration,
                num_draft_tokens=self._count,
                spool=Path(spool),
                rounding=ServedInputs(engine, prepared.scales),
                corrected=corrected_linears(plan),
            )
            measured = Measured(
                input_scales={} if static is None else static.scales,
                input_scale_origin=None if static is None else static.origin,
                statistics=statistics,
            )
            source = resolve_draft(str(self._pair / "draft"))
            quantize_draft(plan, out, source=source, measured=measured)


def print_rows(rows: Sequence[Row]) -> None:
    """One row for each draft."""
    columns = ("length", "change", "bounds", "KL, 1e-3 nats")
    found = table(
        "FP4 weights under other inputs",
        *("pair", "weights", "inputs", "weights found for", *columns),
        right=columns,
    )
    for row in rows:
        found.row(
            row.pair,
            row.weights,
            row.engine,
            "the same" if row.found_for == row.engine else row.found_for,
            f"{row.acceptance_length:.4f}",
            f"{row.change:+.2%}",
            f"({row.lower:+.2%}, {row.upper:+.2%})",
            f"{1000 * row.divergence:.2f}",
        )
    print_table(found)


def measured_rows(asked: argparse.Namespace) -> list[Row]:
    """Every pair with weights of every format.

    Raises:
        BenchError: something could not be made.
    """
    rows = []
    for pair in asked.pair:
        bench = Bench(
            pair,
            asked.workdir,
            prompts=asked.prompts,
            divergence_prompts=asked.divergence_prompts,
        )
        for weights in asked.weights:
            for row in bench.rows(weights, asked.engine):
                rows.append(row)
                stderr().line(
                    f"{row.pair} {row.weights} {row.engine} | {row.found_for}: {row.change:+.2%}"
                    f" ({row.lower:+.2%}, {row.upper:+.2%}), KL {1000 * row.divergence:.3f}"
                )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = benchmark_parser("bench_engine_changes", __doc__)
    add_pairs(parser)
    known = dict.fromkeys(one.name for weights in RECIPES for one in engines(weights))
    parser.add_argument("--weights", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--engine", nargs="*", choices=known, default=[], help="default: all")
    parser.add_argument("--prompts", type=int, default=240, help="beside the shipped 96")
    parser.add_argument("--divergence-prompts", type=int, default=96, help="of them, for the KL")
    return run_benchmark(parser, arguments, measured_rows, lambda _, rows: print_rows(rows))


if __name__ == "__main__":
    sys.exit(main())
