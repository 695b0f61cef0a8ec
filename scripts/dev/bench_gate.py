"""How often the gate is wrong: its verdicts over simulated drafts whose true change is known.

    python -m draftquant.scripts.dev.bench_gate [--runs 2000] [--seed 0] [--json]

Seven tables: verdicts of whole traces, also with copies of prompts; a loss that lies in some
prompts; prompts that belong together; how often the bounds cover the truth; categories that lose
more than the whole; context bins that do; and repeated looks at a growing set of prompts. "Plain"
is the rule without what this gate adds: every recorded prompt counts as one, linearised standard
error, t with N - 1 degrees of freedom, no categories. Rates are shares of the runs.
"""

import dataclasses
import math
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy import stats

from ...validate.counting.acceptance_counts import AcceptanceCounts
from ...validate.counting.paired_change import paired_change
from ...validate.judging.categories import Outcome
from ...validate.judging.interim_analysis import Look, Spending
from ...validate.judging.judgement import GateReport, judge
from ...validate.judging.policy import POLICIES
from .command_lines import Figures, simulate
from .simulated_bounds import dependent, losses
from .simulated_replays import Recorded, over_contexts, record, replays

RELEASE = POLICIES["release"]
LIMIT = -RELEASE.max_relative_drop
MOST_PROMPTS = 1000  # nobody records more, whatever the gate advises

Bounds = tuple[float, float]
Scenario = Callable[[np.random.Generator], Recorded]


def verdicts(runs: int, seed: int) -> Figures:
    """PASS and FAIL of the plain rule beside the gate's verdicts."""
    scenarios: dict[str, Scenario] = {
        f"100 prompts, true change {change:+.1%}": _plainly(100, change)
        for change in (-0.02, LIMIT, -0.005, 0.0)
    }
    scenarios |= {
        "10 copies of each of 30 prompts, -1.0%": lambda g: record(g, 30, LIMIT).times(10),
        "10 copies of each of 60 prompts, -1.0%": lambda g: record(g, 60, LIMIT).times(10),
        "one prompt 40 times, -4.8%": lambda g: record(g, 1, -0.048).times(40),
        "one prompt 40 times, disguised, -4.8%": (
            lambda g: record(g, 1, -0.048).times(40).taken_for_distinct()
        ),
        "100 prompts of heavy-tailed lengths, -1.0%": (
            lambda g: record(g, 100, LIMIT, length_spread=1.5)
        ),
    }
    rows = {}
    for name, scenario in scenarios.items():
        plain: Counter[str] = Counter()
        gate: Counter[str] = Counter()
        for recorded in _draws(name, scenario, runs, seed):
            plain[plain_outcome(recorded)] += 1
            gate[judged(recorded).verdict] += 1
        rows[name] = (
            *(plain[verdict] / runs for verdict in ("PASS", "FAIL")),
            *(gate[verdict] / runs for verdict in ("PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS")),
        )
    columns = ("plain PASS", "plain FAIL", "PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS")
    return Figures(title="Verdicts under 'release'", columns=columns, rows=rows)


def coverage(runs: int, seed: int) -> Figures:
    """How often each one-sided 95 % bound of a draft at -1 % covers the truth."""
    truth, rows = math.log1p(LIMIT), {}
    for count in (30, 100):
        for spread in (0.1, 0.5, 1.0, 1.5):
            name = f"{count} prompts, spread of log length {spread}"
            covered, effective = np.zeros(4), 0.0
            for recorded in _draws(name, _plainly(count, LIMIT, spread), runs, seed):
                change = paired_change(*_counts(recorded), confidence=RELEASE.confidence)
                plain = plain_bounds(recorded)
                covered += [plain[0] <= truth, truth <= plain[1],
                            change.lower <= truth, truth <= change.upper]  # fmt: skip
                effective += change.effective_num_prompts
            rows[f"{name} ({effective / runs:.0f} effective)"] = tuple(covered / runs)
    columns = ("plain lower", "plain upper", "lower", "upper")
    return Figures(title="Coverage of the bounds (95 % is promised)", columns=columns, rows=rows)


def categories(runs: int, seed: int) -> Figures:
    """300 prompts; does a category that lost much stand out, and only such a one?"""
    scenarios: dict[str, Scenario] = {
        "10 categories, none loses": _in_categories([0.0] * 10),
        "10 categories, one loses 4%": _in_categories([-0.04] + [0.0] * 9),
        "10 categories, one loses 6%": _in_categories([-0.06] + [0.0] * 9),
        "10 categories, each loses 1%": _in_categories([LIMIT] * 10),
        "3 categories, one loses 4%": _in_categories([-0.04, 0.0, 0.0]),
    }
    rows = {}
    for name, scenario in scenarios.items():
        found = np.zeros(6)
        for recorded in _draws(name, scenario, runs, seed):
            report = judged(recorded)
            outcomes = [category.outcome for category in report.categories]
            failed = "FAIL" in outcomes
            named = any("lost more than its" in warning for warning in report.warnings)
            every = report.verdict == "PASS" and set(outcomes) == {"PASS"}
            found += [plain_outcome(recorded) == "PASS", report.verdict == "PASS", failed,
                      outcomes[0] == "FAIL", failed or named, every]  # fmt: skip
        rows[name] = tuple(found / runs)
    columns = ("plain PASS", "PASS", "FAIL", "first FAIL", "FAIL or warned", "every one PASS")
    return Figures(title="Categories, limit -3 %", columns=columns, rows=rows)


def contexts(runs: int, seed: int) -> Figures:
    """200 prompts of one category or of five, over three context bins; the longest bin loses.

    Of the prompts, 60 reach the third bin with a third of their rounds.
    """
    scenarios: dict[str, Scenario] = {
        f"{number} categor{'y' if number == 1 else 'ies'}, {name}": _over_bins(number, changes)
        for number in (1, 5)
        for name, changes in (
            ("nothing lost", (0.0, 0.0, 0.0)),
            ("longest bin at its limit, -3%", (0.0, 0.0, -0.03)),
            ("longest bin loses 5%", (0.0, 0.0, -0.05)),
            ("longest bin loses 8%", (0.0, 0.0, -0.08)),
            ("each bin loses 1%", (LIMIT, LIMIT, LIMIT)),
        )
    }
    rows = {}
    for name, scenario in scenarios.items():
        found = np.zeros(5)
        for recorded in _draws(name, scenario, runs, seed):
            report = judged(recorded)
            longest = report.context_bins[-1]
            failed = [part.outcome == "FAIL" for part in report.parts.all]
            warned = any("lost more than its" in warning for warning in report.warnings)
            found += [judged(dataclasses.replace(recorded, contexts=())).verdict == "PASS",
                      report.verdict == "PASS", any(failed), longest.outcome == "FAIL",
                      any(failed) or warned]  # fmt: skip
        rows[name] = tuple(found / runs)
    columns = ("PASS without bins", "PASS", "any part FAIL", "longest FAIL", "FAIL or warned")
    return Figures(title="Context bins, limit -3 %", columns=columns, rows=rows)


def looks(runs: int, seed: int) -> Figures:
    """How often a draft passes at any of several looks: at -1 % falsely, at 0 rightly."""
    strategies: dict[str, Callable[[np.random.Generator, float], bool]] = {
        "1 look at 60 prompts": lambda g, change: growing(g, change, 1, None),
        "2 looks, extended as once advised": lambda g, change: as_advised(g, change, 2),
        "3 looks, extended as once advised": lambda g, change: as_advised(g, change, 3),
    }
    for total in (2, 3):
        strategies |= {
            f"{total} looks, 60 more each, plain": growing_to(total, None),
            f"{total} looks, 60 more each, pocock": growing_to(total, "pocock"),
            f"{total} looks, 60 more each, obrien-fleming": growing_to(total, "obrien-fleming"),
            f"{total} fresh sets of 60, each alone": fresh(total),
        }
    rows = {}
    for name, strategy in strategies.items():
        rows[name] = tuple(
            sum(strategy(generator, change) for _ in range(runs)) / runs
            for change in (LIMIT, 0.0)
            for generator in [_generator(name, seed)]
        )
    columns = ("passes at -1 %", "passes at 0")
    return Figures(title="Looking again while INCONCLUSIVE", columns=columns, rows=rows)


TABLES = {
    "verdicts": verdicts,
    "losses": losses,
    "dependent": dependent,
    "coverage": coverage,
    "categories": categories,
    "contexts": contexts,
    "looks": looks,
}


def judged(recorded: Recorded, look: Look | None = None) -> GateReport:
    """The gate's report under `release`."""
    return judge(*replays(recorded), RELEASE, look=look)


def plain_bounds(recorded: Recorded) -> Bounds:
    """Bounds of theta -+ t_{0.95, N - 1} * sd(psi) / sqrt(N), psi linearised."""
    width = np.arange(recorded.baseline.shape[1]) + 1
    influence, theta, count = np.zeros(len(recorded.prompts)), 0.0, len(recorded.prompts)
    for sign, histograms in ((1, recorded.candidate), (-1, recorded.baseline)):
        tokens, steps = histograms @ width, histograms.sum(axis=1)
        influence += sign * (tokens / tokens.mean() - steps / steps.mean())
        theta += sign * math.log(tokens.sum() / steps.sum())
    error = float(influence.std(ddof=1)) / math.sqrt(count)
    half = float(stats.t.ppf(RELEASE.confidence, count - 1)) * error
    return theta - half, theta + half


def plain_outcome(recorded: Recorded) -> Outcome:
    """The verdict of the plain rule."""
    lower, upper = plain_bounds(recorded)
    limit = math.log1p(LIMIT)
    return "PASS" if lower > limit else "FAIL" if upper < limit else "INCONCLUSIVE"


def _plainly(count: int, change: float, length_spread: float = 0.1) -> Scenario:
    return lambda generator: record(generator, count, change, length_spread=length_spread)


def _in_categories(changes: Sequence[float]) -> Scenario:
    """300 prompts in equal categories, named in order."""

    def draw(generator: np.random.Generator) -> Recorded:
        each = 300 // len(changes)
        first, *others = (
            record(generator, each, change, category=f"{number:02}")
            for number, change in enumerate(changes)
        )
        for other in others:
            first = first + other
        return first

    return draw


def _over_bins(num_categories: int, changes: Sequence[float]) -> Scenario:
    """200 prompts, of which 60 reach the last bin."""

    def draw(generator: np.random.Generator) -> Recorded:
        own = [record(generator, 200, change) for change in changes]
        reaches = np.arange(200)[:, None] % 10 < 3
        last = dataclasses.replace(
            own[-1], baseline=own[-1].baseline * reaches, candidate=own[-1].candidate * reaches
        )
        names = [f"{number % num_categories:02}" for number in range(200)]
        return dataclasses.replace(over_contexts([*own[:-1], last]), categories=names)

    return draw


def as_advised(generator: np.random.Generator, change: float, total: int) -> bool:
    """Whether it passes with 60 prompts, then as many as the measured change would need."""
    recorded = record(generator, 60, change)
    for number in range(1, total + 1):
        report = judged(recorded)
        if report.verdict != "INCONCLUSIVE" or number == total:
            break
        required = report.required_num_prompts and report.required_num_prompts.as_measured
        more = min(required or 0, MOST_PROMPTS) - len(recorded.prompts)
        if more <= 0:
            break  # beyond the limit as measured, or enough recorded
        recorded = recorded + record(generator, more, change)
    return report.verdict == "PASS"


def growing_to(
    total: int, spending: Spending | None
) -> Callable[[np.random.Generator, float], bool]:
    """`growing` as a strategy."""
    return lambda generator, change: growing(generator, change, total, spending)


def growing(
    generator: np.random.Generator, change: float, total: int, spending: Spending | None
) -> bool:
    """Whether it passes with 60 prompts more at each look, until a verdict."""
    recorded = record(generator, 60 * total, change)
    for number in range(1, total + 1):
        look = spending and Look(number=number, total=total, spending=spending)
        verdict = judged(recorded.first(60 * number), look or None).verdict
        if verdict != "INCONCLUSIVE":
            break
    return verdict == "PASS"


def fresh(total: int) -> Callable[[np.random.Generator, float], bool]:
    """Another 60 prompts at each try, judged alone, until a verdict."""

    def passes(generator: np.random.Generator, change: float) -> bool:
        tries = (judged(record(generator, 60, change)).verdict for _ in range(total))
        return next((found for found in tries if found != "INCONCLUSIVE"), "") == "PASS"

    return passes


def _counts(recorded: Recorded) -> tuple[list[AcceptanceCounts], list[AcceptanceCounts]]:
    baseline, candidate = replays(recorded)
    return [p.counts for p in baseline.prompts], [p.counts for p in candidate.prompts]


def _draws(name: str, scenario: Scenario, runs: int, seed: int) -> Iterator[Recorded]:
    generator = _generator(name, seed)
    return (scenario(generator) for _ in range(runs))


def _generator(name: str, seed: int) -> np.random.Generator:
    """One per scenario, so that its figures depend on no other."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0."""
    return simulate(
        arguments,
        prog="bench_gate",
        description="Simulated error rates of 'draftquant gate'.",
        tables=TABLES,
        runs=2000,
    )


if __name__ == "__main__":
    sys.exit(main())
