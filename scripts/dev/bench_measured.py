"""How often `gate --measured` is wrong: its bounds and verdicts where the two outputs part.

    python -m draftquant.scripts.dev.bench_measured [--runs 1000] [--seed 0] [--json]

Two tables: how often each one-sided bound covers the truth, beside whole outputs and common text
alone; and verdicts under `release`, with the prompts that a draft like its baseline needs to pass.
Rates are shares of the runs.
"""

import math
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from ...validate.counting.paired_change import PairedChange, required_prompts
from ...validate.judging.judgement import GateReport
from ...validate.judging.policy import POLICIES
from ...validate.served.served_gate import judge_measured
from .command_lines import Figures, simulate
from .simulated_servers import Parting, measure

RELEASE = POLICIES["release"]
LIMIT = -RELEASE.max_relative_drop
PARTINGS = {
    "equal outputs": Parting(hazard=0.0),
    "rarely, by chance": Parting(hazard=0.001),
    "often, by chance": Parting(hazard=0.004),
    "nearly always, by chance": Parting(hazard=0.02),
    "often, sooner where hard": Parting(hazard=0.004, with_ease=1.0),
    "rarely, sooner where hard, which loses more": Parting(
        hazard=0.001, with_ease=1.0, loss_with_ease=0.7
    ),
    "often, sooner where hard, which loses more": Parting(
        hazard=0.004, with_ease=1.0, loss_with_ease=0.7
    ),
    "nearly always, sooner where hard, which loses more": Parting(
        hazard=0.012, with_ease=1.0, loss_with_ease=0.7
    ),
}


def coverage(runs: int, seed: int) -> Figures:
    """How often each one-sided 95 % bound of a draft at -1 % covers the truth, 100 prompts."""
    truth, rows = math.log1p(LIMIT), {}
    for name, parting in PARTINGS.items():
        found = np.zeros(9)
        for report in _judged(name, parting, 100, LIMIT, runs, seed):
            served = report.served
            assert served is not None  # of measurements
            shares = [served.identical_share or 0.0, served.common_share or 0.0, 0.0]
            covered = [
                share
                for change in (served.whole_change, served.common_change, report.change)
                for share in _covers(change, truth)
            ]
            found += [*shares, *covered]
        rows[name] = tuple(np.delete(found, 2) / runs)
    columns = (
        *("equal outputs", "common tokens", "whole lower", "whole upper"),
        *("common lower", "common upper", "lower", "upper"),
    )
    return Figures(title="Coverage of the bounds (95 % is promised)", columns=columns, rows=rows)


def verdicts(runs: int, seed: int) -> Figures:
    """Verdicts of 200 prompts, and prompts needed if nothing was lost, by two estimates."""
    rows = {}
    for name, parting in PARTINGS.items():
        for change in (LIMIT, 0.0):
            title = f"{name}, {change:+.0%}"
            said: Counter[str] = Counter()
            needed = np.zeros(2)
            for report in _judged(title, parting, 200, change, runs, seed):
                assert report.served is not None  # of measurements
                said[report.verdict] += 1
                estimates = (report.served.whole_change, report.change)
                needed += [_needed(estimate) for estimate in estimates]
            shares = (said[verdict] / runs for verdict in ("PASS", "FAIL", "INCONCLUSIVE"))
            rows[title] = (*shares, *(needed / runs / 100))
    columns = ("PASS", "FAIL", "INCONCLUSIVE", "needed by whole outputs", "needed")
    title = "Verdicts under 'release', 200 prompts; needed prompts in percent of 100"
    return Figures(title=title, columns=columns, rows=rows)


TABLES = {"coverage": coverage, "verdicts": verdicts}


def _judged(
    name: str, parting: Parting, count: int, change: float, runs: int, seed: int
) -> Iterator[GateReport]:
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    for _ in range(runs):
        yield judge_measured(*measure(generator, count, change, parting), RELEASE)


def _covers(change: PairedChange | None, truth: float) -> tuple[bool, bool]:
    return (False, False) if change is None else (change.lower <= truth, truth <= change.upper)


def _needed(change: PairedChange | None) -> int:
    """Prompts with which a draft that lost nothing passes with the policy's power."""
    assert change is not None  # there are enough prompts
    return required_prompts(
        change, max_relative_drop=-LIMIT, power=RELEASE.power, min_prompts=RELEASE.min_prompts
    ).if_unchanged


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0."""
    return simulate(
        arguments,
        prog="bench_measured",
        description="Simulated error rates of 'draftquant gate --measured'.",
        tables=TABLES,
        runs=1000,
    )


if __name__ == "__main__":
    sys.exit(main())
