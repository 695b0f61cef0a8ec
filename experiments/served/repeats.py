"""How often the gate is wrong about two servers of one draft (error_rates.md), with batch noise.

Usage: `python experiments/served/repeats.py RUN.jsonl`; RUN is of `measure`. A repeat parts from it
at near ties of the target, and verify steps accept otherwise at near ties of the draft. What
follows either is drawn from all steps of the run. Lost steps of the second server accept nothing.
"""

import dataclasses
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.policy import POLICIES
from draftquant.validate.measure.measurement import Measurement
from draftquant.validate.measure.measurement_file import read_measurement
from draftquant.validate.served.common_steps import step_starts
from draftquant.validate.served.served_gate import judge_measured

GATES, FLIPS = 200, 0.01  # 0.2 to 1.5 % of the verify steps of RESULTS.md differ from replay's
SCENES = ((0.002, 0.0), (0.01, 0.0), (0.02, 0.0), (0.002, 0.02), (0.002, 0.05))
GENERATOR = np.random.default_rng(0)


def repeated(run: Measurement, parting: float, lost: float) -> Measurement:
    """The run again; texts part at this share of their tokens."""
    records, most = [], run.setup.speculation.num_draft_tokens  # type: ignore[union-attr]
    pool = [a for record in run.records for a in record.accepted or ()]
    for record in run.records:
        known = dict(zip(step_starts(record, most) or (), record.accepted or (), strict=False))
        length, parts_at = len(record.token_ids), int(GENERATOR.geometric(parting))
        steps, place = list[int](), 1
        while place < length:
            accepted = known.get(place) if place < parts_at else None
            if accepted is None or GENERATOR.random() < FLIPS:
                accepted = int(GENERATOR.choice(pool))
            steps.append(0 if GENERATOR.random() < lost else accepted)
            place += steps[-1] + 1
        own = map(int, GENERATOR.integers(10**6, 2 * 10**9, max(0, length - parts_at)))
        records.append(dataclasses.replace(
            record, token_ids=(*record.token_ids[:parts_at], *own), accepted=tuple(steps),
            drafted=None, histogram=tuple(steps.count(j) for j in range(most + 1)),
            latency=record.latency + GENERATOR.random(),
        ))  # fmt: skip
    return dataclasses.replace(run, records=tuple(records))


if __name__ == "__main__":
    measured = read_measurement(Path(sys.argv[1]))
    for parting, lost in SCENES:
        verdicts, changes = Counter[str](), list[float]()
        for _ in range(GATES):
            pair = (repeated(measured, parting, each) for each in (0.0, lost))
            one_server = Background(unrelated=True)
            report = judge_measured(*pair, POLICIES["release"], background=one_server)
            verdicts[report.verdict] += 1
            changes.append(report.relative_change or 0.0)
        shares = {verdict: f"{n / GATES:.1%}" for verdict, n in sorted(verdicts.items())}
        print(f"{parting:.1%} part, {lost:.0%} lost: {np.mean(changes):+.2%}, {shares}", flush=True)
