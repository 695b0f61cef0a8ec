"""How often the gate on two targets is wrong: real prompts of both, drawn again and again.

    python -m benchmarks.targets DRAFT TRACES TRACES2 [--runs 500] [--prompts 300] [--json]

Prompts are drawn with replacement. The sides of each are swapped by chance, so that nothing is lost
on average while texts and counts stay real; then a share of the second side's verify steps is split
in two, which writes the same text in more steps: the acceptance length falls by a known share.

Steps are split after they were found to lie in common text or not: the first half of a step across
the end of common text would count as common, and the drop be 0.93 % where 1 % was asked. `change`
shows what was lost on average. With 300 prompts: on eagle3-llama beside its FP8 target (1,000 runs)
4.8 % PASS at the limit, 92.0 % FAIL at a drop of 3 %; on eagle3-mla (400 runs) 4.8 % and 92.2 %.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from draftquant import api as dq
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts, pooled
from draftquant.validate.counting.draft_counts import CountedDraft, PromptCounts, TextFigures
from draftquant.validate.judging.judgement import GateReport, judge_counts
from draftquant.validate.judging.policy import POLICIES
from draftquant.validate.measure.measurement import RequestRecord
from draftquant.validate.served.common_steps import PairedOutputs, pair_outputs
from draftquant.validate.served.target_pair import TARGETS, BesideTarget

from .command_line import run_benchmark

Paired = tuple[RequestRecord, PairedOutputs]
"""The first record of a prompt, and both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Rates of verdicts, in [0, 1], where the acceptance length falls by `drop`.

    `change` is the mean over the runs of what they measured, -0.01 for a drop of 1 %.
    """

    drop: float
    change: float
    passed: float
    failed: float
    inconclusive: float
    anomalous: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `run_benchmark`."""
    parser = argparse.ArgumentParser(prog="benchmarks.targets", description=__doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("traces", type=Path, nargs=2)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    return run_benchmark(parser, arguments, _measure, _columns)


def _measure(asked: argparse.Namespace) -> list[Row]:
    sides = []
    for folder in asked.traces:
        (replay,) = dq.replay([asked.draft], folder)
        sides.append(BesideTarget(replay=replay, traces=TraceFolder.open(folder)).records)
    paired = both_ways(sides, replay.num_draft_tokens)
    generator = np.random.default_rng(asked.seed)
    rows = []
    for drop in (0.0, 0.01, 0.03):
        found = [simulated(generator, paired, asked.prompts, drop) for _ in range(asked.runs)]
        verdicts: list[str] = [report.verdict for report in found]
        rates = [verdicts.count(one) / asked.runs for one in _VERDICTS]
        change = float(np.mean([report.relative_change or 0.0 for report in found]))
        rows.append(Row(drop=drop, change=change, **dict(zip(_RATES, rates, strict=True))))
    return rows


_RATES = [field.name for field in dataclasses.fields(Row)][2:]
_VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS")


def both_ways(sides: Sequence[Sequence[RequestRecord]], num_draft_tokens: int) -> list[Paired]:
    """Every prompt twice, each side once as the first."""
    ways = (way for pair in zip(*sides, strict=True) for way in (pair, pair[::-1]))
    return [(one, pair_outputs(one, other, num_draft_tokens, greedy=True)) for one, other in ways]


def simulated(
    generator: np.random.Generator, paired: Sequence[Paired], count: int, drop: float
) -> GateReport:
    """The report on so many drawn prompts, each with its sides one way or the other."""
    prompts: tuple[list[PromptCounts], list[PromptCounts]] = ([], [])
    depth = paired[0][1].baseline.whole.num_draft_tokens
    for number, place in enumerate(generator.integers(len(paired), size=count).tolist()):
        one, outputs = paired[place]
        both, share = outputs.candidate, drop / (1 - drop)
        common, rest = (splitted(generator, own, share) for own in (both.common, both.rest))
        split = dataclasses.replace(both, common=common, rest=rest)
        weighted = dataclasses.replace(outputs, candidate=split).weighted()
        for side, counts in zip(prompts, weighted, strict=True):
            key = dataclasses.replace(one, id=str(number), prompt_sha256=f"{number}")
            side.append(PromptCounts.of(key, counts))
    baseline, candidate = (
        CountedDraft(
            name=name,
            num_draft_tokens=depth,
            prompts=tuple(own),
            counts=pooled((each.counts for each in own), depth),
            text=TextFigures(mean_token_probability=None, num_near_duplicates=0),
        )
        for name, own in zip(("first", "second"), prompts, strict=True)
    )
    policy = dataclasses.replace(POLICIES["release"], name="custom", record_required=False)
    return judge_counts(baseline, candidate, policy, incomparable="", estimand="", wording=TARGETS)


def splitted(
    generator: np.random.Generator, counts: AcceptanceCounts, share: float
) -> AcceptanceCounts:
    """The same text in more verify steps: by `share` of them, of those that accepted a token."""
    depth = counts.num_draft_tokens
    accepted = np.repeat(np.arange(depth + 1), np.asarray(counts.histogram, dtype=np.int64))
    chance = min(1.0, share * len(accepted) / max(1, int(np.count_nonzero(accepted))))
    chosen = (accepted > 0) & (generator.random(len(accepted)) < chance)
    first = generator.integers(accepted[chosen])
    steps = np.concatenate([accepted[~chosen], first, accepted[chosen] - first - 1])
    return AcceptanceCounts.of(steps.tolist(), depth)


def _columns(row: Row) -> dict[str, str]:
    first = {"drop": f"{row.drop:.0%}", "change": f"{row.change:+.2%}"}
    return first | {name: f"{getattr(row, name):.1%}" for name in _RATES}


if __name__ == "__main__":
    sys.exit(main())
