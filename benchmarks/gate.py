"""How often the gate is wrong: its verdicts over simulated drafts whose true change is known.

    python -m benchmarks.gate [--runs 2000] [--seed 0] [--only losses looks] [--json]

Scenarios: drafts of several changes; a loss that lies in some prompts; prompts of very different
lengths; copies of prompts, and prompts that share an effect; targets that recite; categories and
context bins that lose more than the whole; repeated looks at a growing set of prompts; a recipe
that was chosen among several. Rates are shares of the runs.
"""

import argparse
import dataclasses
import math
import sys
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from draftquant.scripts.frame.console import stderr
from draftquant.validate.comparison.recipe_selection import Contender, Selection, tried
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.judging.policy import POLICIES, Look, Spending

from .command_line import run_benchmark
from .simulated_replays import Loss, Recorded, over_contexts, record, replays

RELEASE = POLICIES["release"]
LIMIT = -RELEASE.max_relative_drop
Draw = Callable[[np.random.Generator], Recorded]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated again and again.

    Attributes:
        judged: one run, up to the last verdict.
        truth: the change of the whole; None where its parts change differently.
    """

    judged: Callable[[np.random.Generator], GateReport]
    truth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Rates over all runs of a scenario, in [0, 1].

    Attributes:
        lower_covers, upper_covers: how often a bound covers the truth, where there is a change.
        part_found: how often a category or a context bin fails, or a warning names it.
    """

    scenario: str
    passed: float
    failed: float
    inconclusive: float
    anomalous: float
    lower_covers: float
    upper_covers: float
    part_found: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `run_benchmark`."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gate", description="Simulated error rates of 'draftquant gate'."
    )
    parser.add_argument("--runs", type=int, default=2000, help="simulated gates per scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    return run_benchmark(parser, arguments, _measure, _columns)


def _measure(asked: argparse.Namespace) -> list[Row]:
    rows = []
    for group in asked.only:
        stderr().line(f"{group}: {asked.runs} runs of each scenario")
        for name, scenario in SCENARIOS[group]().items():
            rows.append(simulated(f"{group}: {name}", scenario, asked.runs, asked.seed))
    return rows


def simulated(name: str, scenario: Scenario, runs: int, seed: int) -> Row:
    """The rates of one scenario; its generator is its own, by its name: no other row changes it."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    rates = np.mean(
        [_seen(scenario.judged(generator), scenario.truth) for _ in range(runs)], axis=0
    )
    return Row(scenario=name, **dict(zip(_RATES, rates.tolist(), strict=True)))


_RATES = [field.name for field in dataclasses.fields(Row)][1:]


def _seen(report: GateReport, truth: float | None) -> list[float]:
    """What a run adds to each rate."""
    verdicts = [report.verdict == one for one in ("PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS")]
    lower = upper = math.nan
    if truth is not None and report.change is not None:
        lower = report.change.lower <= math.log1p(truth)
        upper = math.log1p(truth) <= report.change.upper
    found = any(part.outcome == "FAIL" for part in report.parts.all)
    named = any("lost more than its" in warning for warning in report.warnings)
    return [*map(float, verdicts), lower, upper, float(found or named)]


def _columns(row: Row) -> dict[str, str]:
    rates = {name.replace("_", " "): getattr(row, name) for name in _RATES}
    return {"scenario": row.scenario} | {
        name: "" if math.isnan(rate) else f"{rate:.1%}" for name, rate in rates.items()
    }


def _once(draw: Draw, truth: float | None = None) -> Scenario:
    """A single gate under `release`."""
    return Scenario(judged=lambda generator: _judge(draw(generator)), truth=truth)


def _judge(recorded: Recorded, look: Look | None = None) -> GateReport:
    background = Background(seen_continuations=tuple(map(str, recorded.seen)))
    return judge(*replays(recorded), RELEASE, look=look, background=background)


def _plain(count: int, change: float, **how: typing.Any) -> Scenario:
    """`count` distinct prompts; see `record`."""
    return _once(lambda generator: record(generator, count, change, **how), change)


def changes() -> Mapping[str, Scenario]:
    """100 prompts."""
    return {
        f"true change {change:+.1%}": _plain(100, change) for change in (-0.02, LIMIT, -0.005, 0.0)
    }


def losses() -> Mapping[str, Scenario]:
    """A draft at the limit whose loss lies in some prompts."""
    return {
        f"{count} prompts, {LIMIT:+.1%}, who loses: {loss}": _plain(
            count, LIMIT, loss=loss, length_spread=0.8 if loss == "long" else 0.1
        )
        for count in (36, 60, 100, 300)
        for loss in typing.get_args(Loss)
    }


def lengths() -> Mapping[str, Scenario]:
    """Prompts of which some are far longer."""
    return {
        f"{count} prompts, {LIMIT:+.1%}, spread of log length {spread}": _plain(
            count, LIMIT, length_spread=spread
        )
        for count in (30, 100)
        for spread in (0.5, 1.0, 1.5)
    }


def together() -> Mapping[str, Scenario]:
    """Copies, told by their hashes or disguised, and groups of five that share an effect."""
    groups = {
        f"300 prompts in groups of five, {change:+.1%}": (300, change) for change in (LIMIT, 0.0)
    }
    return {
        "10 copies of each of 30 prompts, -1.0%": _once(lambda g: record(g, 30, LIMIT).times(10)),
        "10 copies of each of 60 prompts, -1.0%": _once(
            lambda g: record(g, 60, LIMIT).times(10), LIMIT
        ),
        "one prompt 40 times, -4.8%": _once(lambda g: record(g, 1, -0.048).times(40)),
        "one prompt 40 times, disguised, -4.8%": _once(
            lambda g: record(g, 1, -0.048).times(40).as_groups(1)
        ),
        **{f"{name}, each as one": _plain(*of, group=5) for name, of in groups.items()},
        **{f"{name}, as groups": _grouped(*of) for name, of in groups.items()},
        "100 prompts in pairs that were chosen by the counts, -1.0%": _once(
            lambda g: record(g, 100, LIMIT).paired_by_counts(), LIMIT
        ),
    }


def _grouped(count: int, change: float) -> Scenario:
    return _once(lambda g: record(g, count, change, group=5).as_groups(5), change)


def recited() -> Mapping[str, Scenario]:
    """100 prompts of a target that recites a few texts, or texts that made the candidate."""
    found = {}
    for share, texts in ((0.05, 1), (0.2, 2), (0.5, 5)):
        name = f"{share:.0%} of the prompts recite {texts} texts"
        made = partial(Recorded.reciting, share=share, texts=texts)
        found[f"{name}, {LIMIT:+.1%}, each as one"] = _changed(LIMIT, made, Recorded.each_as_one)
        for change in (LIMIT, 0.0):
            found[f"{name}, {change:+.1%}, the gate"] = _changed(change, made)
    for share in (0.05, 0.2):
        name = f"{share:.0%} were seen and lose nothing, {LIMIT:+.1%} elsewhere"
        found[f"{name}, all"] = _once(partial(_overfitted, share=share, seen=False))
        found[f"{name}, the gate"] = _once(partial(_overfitted, share=share, seen=True))
        name = f"the {share:.0%} that lose most were seen"
        made = partial(Recorded.losing_most, share=share)
        without = _changed(LIMIT, made, Recorded.without_seen)
        found[f"{name}, {LIMIT:+.1%}, without them"] = without
        for change in (LIMIT, 0.0):
            found[f"{name}, {change:+.1%}, the gate"] = _changed(change, made)
    return found


def _changed(change: float, *made: Callable[[Recorded], Recorded]) -> Scenario:
    """What is made of 100 distinct prompts, step by step."""

    def draw(generator: np.random.Generator) -> Recorded:
        recorded = record(generator, 100, change)
        for step in made:
            recorded = step(recorded)
        return recorded

    return _once(draw, change)


def _overfitted(generator: np.random.Generator, share: float, *, seen: bool) -> Recorded:
    """A share of 100 prompts made the candidate, which lost nothing on them."""
    count = round(100 * share)
    drawn = record(generator, count, 0.0) + record(generator, 100 - count, LIMIT)
    return dataclasses.replace(drawn, seen=range(count if seen else 0))


def categories() -> Mapping[str, Scenario]:
    """300 prompts in equal categories; does one that lost much stand out, and only such a one?"""
    return {
        "10 categories, none loses": _in_categories([0.0] * 10),
        "10 categories, one loses 4%": _in_categories([-0.04] + [0.0] * 9),
        "10 categories, one loses 6%": _in_categories([-0.06] + [0.0] * 9),
        "10 categories, each loses 1%": _in_categories([LIMIT] * 10),
        "3 categories, one loses 4%": _in_categories([-0.04, 0.0, 0.0]),
    }


def _in_categories(losses: Sequence[float]) -> Scenario:
    def draw(generator: np.random.Generator) -> Recorded:
        first, *others = (
            record(generator, 300 // len(losses), change, category=f"{number:02}")
            for number, change in enumerate(losses)
        )
        for other in others:
            first = first + other
        return first

    return _once(draw)


def contexts() -> Mapping[str, Scenario]:
    """200 prompts over three context bins; 60 reach the longest, with a third of their rounds."""
    return {
        "nothing lost": _over_bins((0.0, 0.0, 0.0)),
        "longest bin at its limit, -3%": _over_bins((0.0, 0.0, -0.03)),
        "longest bin loses 5%": _over_bins((0.0, 0.0, -0.05)),
        "longest bin loses 8%": _over_bins((0.0, 0.0, -0.08)),
        "each bin loses 1%": _over_bins((LIMIT, LIMIT, LIMIT)),
    }


def _over_bins(losses: Sequence[float]) -> Scenario:
    def draw(generator: np.random.Generator) -> Recorded:
        *own, last = (record(generator, 200, change) for change in losses)
        reaches = np.arange(200)[:, None] % 10 < 3
        last = dataclasses.replace(
            last, baseline=last.baseline * reaches, candidate=last.candidate * reaches
        )
        return over_contexts([*own, last])

    return _once(draw)


def looks() -> Mapping[str, Scenario]:
    """60 prompts more at each look, or 60 fresh ones, while the verdict is INCONCLUSIVE."""
    found = {}
    for change in (LIMIT, 0.0):
        found[f"1 look, {change:+.1%}"] = _growing(change, 1, None)
        for total in (2, 3):
            for spending in (None, *typing.get_args(Spending)):
                name = f"{total} looks, {spending or 'unplanned'}, {change:+.1%}"
                found[name] = _growing(change, total, spending)
            found[f"{total} fresh sets, {change:+.1%}"] = _fresh(change, total)
    return found


def _growing(change: float, total: int, spending: Spending | None) -> Scenario:
    def reports(generator: np.random.Generator) -> Iterator[GateReport]:
        recorded = record(generator, 60 * total, change)
        for number in range(1, total + 1):
            look = spending and Look(number=number, total=total, spending=spending)
            yield _judge(recorded.first(60 * number), look or None)

    return Scenario(judged=lambda generator: _first_decided(reports(generator)))


def _fresh(change: float, total: int) -> Scenario:
    def reports(generator: np.random.Generator) -> Iterator[GateReport]:
        return (_judge(record(generator, 60, change)) for _ in range(total))

    return Scenario(judged=lambda generator: _first_decided(reports(generator)))


def _first_decided(reports: Iterator[GateReport]) -> GateReport:
    """The first that is not INCONCLUSIVE, else the last."""
    report = next(reports)
    while report.verdict == "INCONCLUSIVE":
        following = next(reports, None)
        if following is None:
            break
        report = following
    return report


def chosen() -> Mapping[str, Scenario]:
    """The recipe of eight that 67 prompts choose, judged on 100 fresh ones, or on these again."""
    return {
        f"of 8 recipes at {change:+.1%}, on {'fresh prompts' if fresh else 'those that chose'}": (
            Scenario(judged=partial(_of_chosen, change=change, fresh=fresh))
        )
        for change, fresh in ((LIMIT, True), (LIMIT, False), (0.0, True))
    }


def _of_chosen(generator: np.random.Generator, change: float, *, fresh: bool) -> GateReport:
    """Each recipe is tried, as beside a long verify step speed is acceptance."""
    names = [f"recipe {number}" for number in range(8)]
    recipes = [Contender(name=name, stored_bytes=1, drafting_seconds=1.0) for name in names]
    found = tried(
        Selection(
            engine="",
            gpu="",
            unquantized=Contender(name="BF16", stored_bytes=2, drafting_seconds=1000.0),
            contenders=tuple(recipes),
            left_out={},
            verify_seconds=1000.0,
        ),
        lambda _: _judge(record(generator, 67, change)),
    )
    one = found.chosen or found.contenders[0]
    assert one.judged is not None  # all were tried
    if found.chosen is None or not fresh:
        return one.judged
    return _judge(record(generator, 100, change))


SCENARIOS: Mapping[str, Callable[[], Mapping[str, Scenario]]] = {
    one.__name__: one
    for one in (changes, losses, lengths, together, recited, categories, contexts, looks, chosen)
}

if __name__ == "__main__":
    sys.exit(main())
