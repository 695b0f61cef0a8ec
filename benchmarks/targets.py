"""How often the gate on two targets is wrong: real prompts of both, drawn again and again.

    python -m benchmarks.targets DRAFT TRACES TRACES2 [--runs 500] [--prompts 300] [--json]

Prompts are drawn with replacement. The sides of each are swapped by chance, so that nothing is lost
on average while texts and counts stay real; then a share of the second side's verify steps is split
in two, which writes the same text in more steps: the acceptance length falls by a known share.
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
from draftquant.validate.judging.judgement import judge_counts
from draftquant.validate.judging.policy import POLICIES
from draftquant.validate.measure.measurement import RequestRecord
from draftquant.validate.served.common_steps import pair_outputs
from draftquant.validate.served.target_pair import TARGETS, BesideTarget

from .command_line import run_benchmark

Pair = tuple[RequestRecord, RequestRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Rates of verdicts, in [0, 1], where the acceptance length falls by `drop`."""

    drop: float
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
    pairs, depth = list(zip(*sides, strict=True)), replay.num_draft_tokens
    generator = np.random.default_rng(asked.seed)
    rows = []
    for drop in (0.0, 0.01, 0.03):
        found = [simulated(generator, pairs, depth, asked.prompts, drop) for _ in range(asked.runs)]
        verdicts = ("PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS")
        rates = [found.count(one) / asked.runs for one in verdicts]
        rows.append(Row(drop=drop, **dict(zip(_RATES, rates, strict=True))))
    return rows


_RATES = [field.name for field in dataclasses.fields(Row)][1:]


def simulated(
    generator: np.random.Generator, pairs: Sequence[Pair], depth: int, count: int, drop: float
) -> str:
    """The verdict on so many drawn prompts."""
    prompts: tuple[list[PromptCounts], list[PromptCounts]] = ([], [])
    for number, place in enumerate(generator.integers(len(pairs), size=count).tolist()):
        one, other = pairs[place] if generator.random() < 0.5 else pairs[place][::-1]
        split = splitted(generator, other, drop / (1 - drop))
        weighted = pair_outputs(one, split, depth, greedy=True).weighted()
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
    return judge_counts(
        baseline, candidate, policy, incomparable="", estimand="", wording=TARGETS
    ).verdict


def splitted(generator: np.random.Generator, record: RequestRecord, share: float) -> RequestRecord:
    """The same text in more verify steps: by `share` of them, of those that accepted a token."""
    accepted = record.accepted or ()
    long = sum(map(bool, accepted))
    chance = min(1.0, share * len(accepted) / max(1, long))
    steps: list[int] = []
    for own in accepted:
        if own and generator.random() < chance:
            first = int(generator.integers(own))
            steps += [first, own - first - 1]
        else:
            steps.append(own)
    most = len(record.histogram or ()) - 1
    histogram = AcceptanceCounts.of(steps, most).histogram
    return dataclasses.replace(record, accepted=tuple(steps), histogram=tuple(map(int, histogram)))


def _columns(row: Row) -> dict[str, str]:
    return {"drop": f"{row.drop:.0%}"} | {name: f"{getattr(row, name):.1%}" for name in _RATES}


if __name__ == "__main__":
    sys.exit(main())
