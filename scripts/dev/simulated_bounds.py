"""Simulated bounds, many samples at once, for `bench_gate`: who loses, and who belongs together.

These tables draw whole gates as arrays and apply the gate's own arithmetic, `jackknife_bounds`,
with the policy's least effective sample size; the other rules of the verdict are left out.
"""

import math
import typing
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...validate.counting.paired_change import jackknife_bounds
from ...validate.judging.policy import POLICIES
from .command_lines import Figures
from .simulated_replays import USUAL_LENGTH_SPREAD, Loss, record

Floats = NDArray[np.float64]
Counts = tuple[Floats, ...]
"""[runs, N] tokens and steps of the baseline, then of the candidate."""

RELEASE = POLICIES["release"]
LIMIT = -RELEASE.max_relative_drop
_MOST_PROMPTS = 30_000  # drawn at a time


def losses(runs: int, seed: int) -> Figures:
    """Losses that lie in some prompts: bounds by Student's t alone, and those of the gate."""
    scenarios: list[tuple[int, float, Loss]] = [
        (count, LIMIT, loss) for count in (36, 60, 100, 300) for loss in typing.get_args(Loss)
    ]
    scenarios += [(100, 2 * LIMIT, "a twentieth")]
    scenarios += [(count, 0.0, "even") for count in (36, 60, 100, 150)]
    rows = {}
    for count, change, loss in scenarios:
        name = f"{count} prompts, true change {change:+.1%}, who loses: {loss}"
        spread = 0.8 if loss == "long" else USUAL_LENGTH_SPREAD
        found = np.zeros(4)
        for drawn in _samples(name, runs, seed, count, change, length_spread=spread, loss=loss):
            found += [*_settled(drawn, skewness=False), *_settled(drawn)]
        rows[name] = tuple(found / runs)
    columns = ("t alone PASS", "t alone FAIL", "PASS", "FAIL")
    return Figures(title="Losses that lie in some prompts", columns=columns, rows=rows)


def dependent(runs: int, seed: int) -> Figures:
    """Near copies, and groups of five that share an effect: each prompt as one, and as clusters."""
    scenarios: dict[str, tuple[int, float, int, int]] = {
        "4 prompts in 9 near copies each, 0": (4, 0.0, 9, 1),
        "60 prompts in 3 near copies each, -1.0%": (60, LIMIT, 3, 1),
        "60 prompts in 10 near copies each, -1.0%": (60, LIMIT, 10, 1),
        "100 prompts in groups of five, -1.0%": (100, LIMIT, 1, 5),
        "300 prompts in groups of five, -1.0%": (300, LIMIT, 1, 5),
        "300 prompts in groups of five, -2.0%": (300, 2 * LIMIT, 1, 5),
        "300 prompts in groups of five, 0": (300, 0.0, 1, 5),
        "600 prompts in groups of five, 0": (600, 0.0, 1, 5),
    }
    rows = {}
    for name, (count, change, copies, group) in scenarios.items():
        found = np.zeros(4)
        for drawn in _samples(name, runs, seed, count, change, group=group):
            recorded = tuple(np.repeat(each, copies, axis=1) for each in drawn)
            clusters = tuple(
                each.reshape(len(each), -1, copies * group).sum(-1) for each in recorded
            )
            found += [*_settled(recorded), *_settled(clusters)]
        rows[name] = tuple(found / runs)
    columns = ("each as one PASS", "each as one FAIL", "clusters PASS", "clusters FAIL")
    return Figures(title="Prompts that belong together", columns=columns, rows=rows)


def _samples(
    name: str,
    runs: int,
    seed: int,
    count: int,
    change: float,
    *,
    length_spread: float = USUAL_LENGTH_SPREAD,
    loss: Loss = "even",
    group: int = 1,
) -> Iterator[Counts]:
    """Gates of `count` prompts, some at a time; a generator per scenario."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    while runs:
        some = min(runs, max(1, _MOST_PROMPTS // count))
        runs -= some
        recorded = record(
            generator,
            some * count,
            change,
            length_spread=length_spread,
            loss=loss,
            group=group,
        )
        width = np.arange(recorded.baseline.shape[1]) + 1.0
        tokens = [side @ width for side in (recorded.baseline, recorded.candidate)]
        steps = [side.sum(1).astype(float) for side in (recorded.baseline, recorded.candidate)]
        yield tuple(
            each.reshape(some, count) for each in (tokens[0], steps[0], tokens[1], steps[1])
        )


def _settled(drawn: Counts, *, skewness: bool = True) -> tuple[int, int]:
    """How many pass, and how many fail."""
    found = jackknife_bounds(*drawn, confidence=RELEASE.confidence)
    lower, upper = found.lower, found.upper
    if not skewness:
        half = found.quantile * found.standard_error
        lower, upper = found.log_ratio - half, found.log_ratio + half
    enough = found.effective_num_prompts >= RELEASE.min_prompts
    limit = math.log1p(LIMIT)
    return int((enough & (lower > limit)).sum()), int((enough & (upper < limit)).sum())
