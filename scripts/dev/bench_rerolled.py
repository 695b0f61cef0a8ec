"""What chance alone does to a draft: the same format, rounded anew, judged by the same prompts.

    python -m draftquant.scripts.dev.bench_rerolled WORKDIR [--pair tests/pairs/eagle3-llama ...]
        [--variants 8] [--json]

Variants of one draft are drawn alike, so that none is better than another by design, yet other
values round up in each. NVFP4: the measured scale of each linear's inputs, times 2^u, which moves
the grid of the group scales and no more. INT4: each row under a scale that is up to 4 % smaller,
which clips its largest weights by as much. u and the share are uniform, drawn by the variant's
number. The gate's bounds are about other prompts for the same draft: what is shown here comes on
top of them. Traces stay in WORKDIR.
"""

import argparse
import dataclasses
import math
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...validate.counting.trace_replay import chosen_num_draft_tokens
from ..console import print_table, stderr, table
from .quality_traces import Calibration, PairTraces

if TYPE_CHECKING:
    from ...quantize.quantization_plan import Plan
    from ...validate.counting.draft_replay import DraftReplay
from .command_lines import add_pairs, benchmark_parser, run_benchmark

NARROWEST = 0.96
"""Of an INT4 scale."""
NVFP4, INT4 = "blackwell-nvfp4", "int4-channel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerolled:
    """All variants of one draft in one format.

    Attributes:
        changes: of the acceptance length against BF16, by variant.
        half_width: distance from the change to its one-sided 95 % bound, mean over the variants.
    """

    pair: str
    recipe: str
    changes: tuple[float, ...]
    half_width: float

    @property
    def deviation(self) -> float:
        """Standard deviation between variants."""
        return statistics.stdev(self.changes)


class Variants:
    """Drafts of one pair, rounded anew each time, and what each one accepts."""

    def __init__(self, pair: Path, work: Path) -> None:
        from ...calibration.traces.trace_folder import TraceFolder

        traces = PairTraces(pair, work / pair.name, 0)
        self._name, self._draft = pair.name, pair / "draft"
        self._gate = TraceFolder.open(traces.gate(Calibration()))
        self._calibration = TraceFolder.open(traces.calibration(Calibration()))
        self._baseline = self._replayed(self._draft)

    def nvfp4(self, count: int) -> Rerolled:
        """The grid of the inputs' group scales, moved by up to a factor of two."""
        return self._judged(NVFP4, map(self._with_other_grids, range(count)))

    def int4(self, count: int) -> Rerolled:
        """The largest weights of each row, clipped by up to a few percent."""
        return self._judged(INT4, map(self._clipped, range(count)))

    def _judged(self, recipe: str, replays: "Iterator[DraftReplay]") -> Rerolled:
        from ...validate.counting.draft_counts import distinct_prompts, recorded_pairs
        from ...validate.judging.categories import change_of

        changes, widths = [], []
        for replay in replays:
            change = change_of(distinct_prompts(recorded_pairs(self._baseline, replay)), 0.95)
            assert change is not None  # a pair ships prompts
            changes.append(change.relative_change)
            widths.append(change.relative_change - math.expm1(change.lower))
            stderr().line(f"{self._name} {recipe} {len(changes)}: {changes[-1]:+.2%}")
        half_width = statistics.fmean(widths)
        return Rerolled(
            pair=self._name, recipe=recipe, changes=tuple(changes), half_width=half_width
        )

    def _with_other_grids(self, seed: int) -> "DraftReplay":
        from ...calibration.linear_inputs.static_scales import calibrated_scales
        from ...quantize.files.hub import resolve_draft
        from ...quantize.measured import Measured
        from ...quantize.quantize_draft import quantize_draft
        from ...quantize.stored.loading import load_draft

        plan = _plan(self._draft, NVFP4)
        draft = load_draft(self._draft, shared=self._calibration.tables(None))
        count = chosen_num_draft_tokens(None, [draft])
        found = calibrated_scales(plan, draft, self._calibration, num_draft_tokens=count)
        draw = random.Random(seed)  # linears that engines fuse share a scale, before and after
        grids = {scale: scale * 2 ** draw.random() for scale in sorted(set(found.scales.values()))}
        scales = {name: grids[scale] for name, scale in found.scales.items()}
        with _scratch() as folder:
            quantize_draft(
                plan,
                folder / "out",
                source=resolve_draft(str(self._draft)),
                measured=Measured(
                    input_scales=scales, input_scale_origin=f"measured, times 2^u, seed {seed}"
                ),
            )
            return self._replayed(folder / "out")

    def _clipped(self, seed: int) -> "DraftReplay":
        import torch
        from safetensors.torch import load_file, save_file

        from ..api.quantize import quantize

        draw = torch.Generator().manual_seed(seed)
        with _scratch() as folder:
            source = folder / "source"
            shutil.copytree(self._draft, source)
            (path,) = source.glob("*.safetensors")
            weights = load_file(path)
            for step in _plan(source, INT4).quantized:
                weight = weights[step.row.tensor.name]
                share = NARROWEST + (1 - NARROWEST) * torch.rand(len(weight), 1, generator=draw)
                largest = weight.abs().amax(dim=1, keepdim=True) * share.to(weight.dtype)
                weights[step.row.tensor.name] = weight.clamp(-largest, largest)
            save_file(weights, path, metadata={"format": "pt"})
            quantize(source, INT4, folder / "out")
            return self._replayed(folder / "out")

    def _replayed(self, folder: Path) -> "DraftReplay":
        from ...quantize.stored.loading import load_draft
        from ...validate.counting.trace_replay import replay_drafts

        draft = load_draft(folder, shared=self._gate.tables(None))
        count = chosen_num_draft_tokens(None, [draft])
        (replay,) = replay_drafts([draft], self._gate, num_draft_tokens=count)
        return replay


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="draftquant-rerolled-") as folder:
        yield Path(folder)


def _plan(draft: Path, recipe: str) -> "Plan":
    from ...quantize.drafts import read_draft
    from ...quantize.files.checkpoint import Checkpoint
    from ...quantize.quantization_plan import make_plan
    from ...recipes import load_recipe

    chosen = dataclasses.replace(load_recipe(recipe), backend="torch")
    return make_plan(chosen, read_draft(Checkpoint.open(draft)))


def print_rows(rows: Sequence[Rerolled]) -> None:
    """One row for each pair and format."""
    numbers = (
        "variants",
        "change, mean",
        "least",
        "most",
        "deviation",
        "gate's half width",
    )
    found = table("The same draft, rounded anew", "pair", "recipe", *numbers, right=numbers)
    for row in rows:
        ends = statistics.fmean(row.changes), min(row.changes), max(row.changes)
        found.row(
            row.pair,
            row.recipe,
            str(len(row.changes)),
            *(f"{each:+.2%}" for each in ends),
            f"{row.deviation:.2%}",
            f"{row.half_width:.2%}",
        )
    print_table(found)


def rerolled(asked: argparse.Namespace) -> list[Rerolled]:
    """Both formats of every pair.

    Raises:
        BenchError: something could not be made.
    """
    rows = []
    for pair in asked.pair:
        variants = Variants(pair, asked.workdir)
        rows += [variants.nvfp4(asked.variants), variants.int4(asked.variants)]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = benchmark_parser("bench_rerolled", __doc__)
    add_pairs(parser)
    parser.add_argument("--variants", type=int, default=8, help="of each format (default 8)")
    return run_benchmark(parser, arguments, rerolled, lambda _, rows: print_rows(rows))


if __name__ == "__main__":
    sys.exit(main())
