"""How often a canary is wrong, and how soon it ends: two simulated servers with golden's requests.

    python -m draftquant.scripts.dev.bench_canary G.json [--runs 2000] [--seed 0]
        [--requests 8000] [--share 0.5]

Both servers draw requests from golden's prompts, 50 a reading in the mean, 32 in flight. The
candidate loses acceptance by a coin for each accepted token. A canary without a verdict after so
many requests of each server, in the mean, is INCONCLUSIVE.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...validate.golden.golden_file import read_golden
from ...validate.monitoring.canary import Comparison, Rule, Verdict
from ..console import print_table, table
from .simulated_traffic import Traffic

MAX_DROP, CONFIDENCE = 0.01, 0.95
LOSSES = (0.0, 0.005, MAX_DROP, 0.02, 0.03, 0.05)
REQUESTS = 50
"""Of a reading and a server, in the mean of both."""


def ended(
    rng: np.random.Generator, traffic: Traffic, rule: Rule, kept: float, most: int, share: float
) -> tuple[Verdict, float]:
    """The verdict of one canary, and the requests of a server, in the mean, until it.

    Args:
        rng: draws the requests.
        traffic: of both servers.
        rule: of the verdict.
        kept: probability with which the candidate keeps an accepted token.
        most: requests of a server, in the mean.
        share: of the requests that the candidate gets.
    """
    readings = most // REQUESTS
    theirs = traffic.readings(rng, round(2 * (1 - share) * most), readings)
    ours = traffic.readings(rng, round(2 * share * most), readings, kept)
    found = Comparison()
    for i, (before, after) in enumerate(zip(theirs.tolist(), ours.tolist(), strict=True), 1):
        found = rule.block(
            replace(
                found,
                baseline=found.baseline.counted(*before),
                candidate=found.candidate.counted(*after),
            )
        )
        verdict, _, _ = rule.verdict(found)
        if verdict != "INCONCLUSIVE":
            return verdict, i * REQUESTS
    return "INCONCLUSIVE", math.inf


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Verdicts of canaries, and when they come")
    parser.add_argument("golden", type=Path)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--share", type=float, default=0.5)
    options = parser.parse_args(argv)
    golden = read_golden(options.golden)
    traffic = Traffic.of(golden)
    rule = Rule.of(golden, max_drop=MAX_DROP, confidence=CONFIDENCE)
    columns = ("PASS", "FAIL", "INCONCLUSIVE", "requests, median", "90 %")
    rows = table(
        f"{options.golden.stem}: {options.runs:,} canaries", "loss", *columns, right=columns
    )
    for loss in LOSSES:
        rng = np.random.default_rng([options.seed, round(1000 * loss)])
        kept = traffic.kept(golden.all.mean_acceptance_length * (1 - loss))
        found = [
            ended(rng, traffic, rule, kept, options.requests, options.share)
            for _ in range(options.runs)
        ]
        shares = (sum(one == verdict for one, _ in found) / len(found)
                  for verdict in ("PASS", "FAIL", "INCONCLUSIVE"))  # fmt: skip
        ends = np.sort([requests for _, requests in found])
        last = (ends[math.ceil(share * len(ends)) - 1] for share in (0.5, 0.9))
        rows.row(f"{loss:.1%}", *(f"{n:.2%}" for n in shares), *(f"{n:,.0f}" for n in last))
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
