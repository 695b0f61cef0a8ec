"""How often a watch alarms falsely, and how soon rightly: simulated traffic like golden's requests.

    python -m draftquant.scripts.dev.bench_watch G.json [G.json ...] [--runs 2000] [--seed 0]

For each golden acceptance: traffic is drawn from its prompts, 32 requests at a time. Each run holds
it against another golden acceptance, of so many prompts drawn from the same ones, so that golden's
error is part of what is simulated. Days have 4,000 requests and 48 readings.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...validate.golden.golden_file import read_golden
from ...validate.monitoring.bets import Limit, limit_of
from ...validate.monitoring.e_detector import DAY, Evidence, after
from ..console import print_table, table
from .simulated_traffic import Counts, Traffic

Rows = dict[str, tuple[float, ...]]
"""Scenario -> its figures: shares up to 1, and requests."""
MAX_DROP, ALPHA = 0.01, 0.01
REQUESTS, READINGS = 4000, 48
"""Of a day."""
MOST_DAYS = 10
"""After which a fall counts as not found."""


def alarm_at(
    evidence: Evidence, limit: Limit, readings: Counts, seconds: float
) -> tuple[Evidence, int | None]:
    """The evidence after these readings, and the first of them that alarms, if one does."""
    for i, (steps, accepted) in enumerate(readings.tolist()):
        evidence = after(evidence, limit, verify_steps=steps, accepted=accepted, seconds=seconds)
        if evidence.log_mean >= math.log(1 / ALPHA):
            return evidence, i
    return evidence, None


def false_alarms(traffic: Traffic, prompts: int, runs: int, seed: int) -> Rows:
    """Share of days with an alarm, where the mean has not fallen below the limit."""
    mean = traffic.golden.all.mean_acceptance_length
    rows: Rows = {}
    for name, readings in (
        ("no change", READINGS), ("no change, a reading a minute", 1440),
        (f"loss of {MAX_DROP:.0%}", READINGS), ("mean at the limit", READINGS),
    ):  # fmt: skip
        rng, found = np.random.default_rng([seed, prompts, readings, len(name)]), 0
        own = runs if readings == READINGS else runs // 4
        for _ in range(own):
            limit = _limit(traffic, rng, prompts)
            at = {"loss of 1%": mean * (1 - MAX_DROP), "mean at the limit": limit.lowest}
            kept = traffic.kept(at.get(name, mean))
            day = traffic.readings(rng, REQUESTS, readings, kept)
            evidence = Evidence.beginning(len(limit.bets))
            found += alarm_at(evidence, limit, day, DAY / readings)[1] is not None
        rows[f"{name}, {own:,} days"] = (found / own,)
    return rows


def detections(traffic: Traffic, prompts: int, runs: int, seed: int) -> Rows:
    """Requests from a fall, after half a day without one, to the alarm."""
    mean = traffic.golden.all.mean_acceptance_length
    rows: Rows = {}
    for loss in (0.03, 0.05, 0.1):
        rng, requests = np.random.default_rng([seed, prompts, round(1000 * loss)]), []
        kept, early = traffic.kept(mean * (1 - loss)), 0
        for _ in range(runs):
            limit = _limit(traffic, rng, prompts)
            before = traffic.readings(rng, REQUESTS // 2, READINGS // 2)
            evidence = Evidence.beginning(len(limit.bets))
            evidence, alarm = alarm_at(evidence, limit, before, DAY / READINGS)
            early += alarm is not None
            requests.append(_found(rng, traffic, limit, evidence, kept))
        found = np.sort(requests)
        rows[f"loss of {loss:.0%}"] = (
            early / runs,
            float(np.isfinite(found).mean()),
            *(float(found[math.ceil(share * runs) - 1]) for share in (0.5, 0.9)),
        )
    return rows


def _limit(traffic: Traffic, rng: np.random.Generator, prompts: int) -> Limit:
    """Of golden acceptance of so many prompts, each time of others."""
    return limit_of(traffic.sample(rng, prompts), MAX_DROP)


def _found(
    rng: np.random.Generator, traffic: Traffic, limit: Limit, evidence: Evidence, kept: float
) -> float:
    """Requests to the alarm; infinity where it does not come."""
    for day in range(4 * MOST_DAYS):
        readings = traffic.readings(rng, REQUESTS // 4, READINGS // 4, kept)
        evidence, alarm = alarm_at(evidence, limit, readings, DAY / READINGS)
        if alarm is not None:
            return day * REQUESTS / 4 + (alarm + 1) * REQUESTS / READINGS
    return math.inf


def _print(title: str, columns: Sequence[str], rows: Rows) -> None:
    found = table(title, "scenario", *columns, right=tuple(columns))
    for name, figures in rows.items():
        found.row(name, *(f"{n:.2%}" if n <= 1 else f"{n:,.0f}" for n in figures))
    print_table(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="False alarms and detections")
    parser.add_argument("golden", nargs="+", type=Path)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000])
    options = parser.parse_args(argv)
    for path in options.golden:
        traffic = Traffic.of(read_golden(path))
        for prompts in options.prompts:
            title = f"{path.stem}, golden acceptance of {prompts:,} prompts"
            asked = traffic, prompts, options.runs, options.seed
            _print(f"{title}: days with a false alarm", ("days",), false_alarms(*asked))
            columns = ("before the fall", f"found in {MOST_DAYS} days", "median", "90 %")
            _print(f"{title}: requests to the alarm", columns, detections(*asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
