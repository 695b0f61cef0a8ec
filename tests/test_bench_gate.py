"""The simulated gate: the drafts change as told, the plain rule is seen as broken, ours is not.

A few dozen seeded runs tell rates that lie far apart; the figures themselves need two thousand.
"""

import json

import numpy as np
import pytest
from draftquant.scripts.dev.bench_gate import (
    LIMIT,
    TABLES,
    as_advised,
    categories,
    fresh,
    growing,
    judged,
    main,
    plain_outcome,
    verdicts,
)
from draftquant.scripts.dev.command_lines import Figures
from draftquant.scripts.dev.simulated_bounds import dependent, losses
from draftquant.scripts.dev.simulated_replays import record, replays
from draftquant.validate.judging.interim_analysis import Spending

pytestmark = pytest.mark.slow

RUNS = 60


def row(figures: Figures, start: str) -> dict[str, float]:
    """The only row whose name begins so, by column."""
    (name,) = [name for name in figures.rows if name.startswith(start)]
    return dict(zip(figures.columns, figures.rows[name], strict=True))


@pytest.mark.parametrize("change", [-0.04, 0.0])
def test_the_population_changes_as_told_and_is_like_the_shipped_pairs(change: float) -> None:
    """20,000 prompts with a deviation of 0.04: the standard error of the change is 0.0003."""
    baseline, candidate = replays(record(np.random.default_rng(0), 20_000, change))
    before, after = (replay.counts.mean_acceptance_length for replay in (baseline, candidate))
    assert after / before - 1 == pytest.approx(change, abs=0.001)
    assert before == pytest.approx(2.90, abs=0.02)
    lengths = [prompt.counts.mean_acceptance_length for prompt in baseline.prompts]
    assert np.std(lengths) == pytest.approx(0.28, abs=0.02)
    report = judged(record(np.random.default_rng(1), 2000, change))
    assert report.change is not None
    assert 0.03 < report.change.standard_deviation < 0.05


def test_prompts_put_together_stay_distinct_and_copies_do_not() -> None:
    generator = np.random.default_rng(0)
    twice = record(generator, 3, 0.0) + record(generator, 2, 0.0, category="other")
    assert list(twice.prompts) == [0, 1, 2, 3, 4]
    assert list(twice.categories) == ["all"] * 3 + ["other"] * 2
    assert list(twice.times(2).prompts) == [0, 1, 2, 3, 4] * 2
    assert list(twice.times(2).taken_for_distinct().prompts) == list(range(10))
    assert twice.first(2).baseline.tolist() == twice.times(2).baseline[5:7].tolist()


def test_copies_fool_the_plain_rule_and_not_the_gate() -> None:
    found = verdicts(RUNS, 0)
    assert row(found, "100 prompts, true change -2.0%")["PASS"] <= 0.05
    assert row(found, "100 prompts, true change +0.0%")["PASS"] > 0.8
    for copies in ("10 copies of each of 30", "10 copies of each of 60"):
        assert row(found, copies)["plain PASS"] > 0.15  # 0.05 is promised
        assert row(found, copies)["PASS"] < row(found, copies)["plain PASS"] / 2
    assert row(found, "one prompt 40 times, -4.8%")["INCONCLUSIVE"] == 1
    assert row(found, "one prompt 40 times, disguised")["ANOMALOUS"] > 0.8
    assert row(found, "one prompt 40 times, disguised")["plain PASS"] > 0.05


def test_near_copies_fool_a_bound_that_knows_no_clusters() -> None:
    found = dependent(300, 0)
    for start in ("60 prompts in 3 near copies", "60 prompts in 10 near copies", "300 prompts in"):
        for name in (name for name in found.rows if name.startswith(start) and "-1.0%" in name):
            each_as_one, _, clusters, _ = found.rows[name]
            assert each_as_one > 0.07  # 0.05 is promised
            assert clusters < 0.09  # a standard error is 0.013
    assert row(found, "4 prompts in 9 near copies each, 0")["each as one PASS"] > 0.4
    assert row(found, "4 prompts in 9 near copies each, 0")["clusters PASS"] == 0
    assert row(found, "600 prompts in groups of five, 0")["clusters PASS"] > 0.97


def test_a_rare_loss_passes_less_often_than_by_t_alone() -> None:
    found = losses(300, 0)
    rare = row(found, "300 prompts, true change -1.0%, who loses: a twentieth")
    assert rare["PASS"] < 0.08
    assert rare["PASS"] < rare["t alone PASS"]
    unchanged = row(found, "100 prompts, true change +0.0%")
    assert unchanged["PASS"] > 0.8
    assert unchanged["t alone PASS"] - unchanged["PASS"] < 0.03


def test_a_lost_category_is_invisible_to_the_plain_rule() -> None:
    found = categories(RUNS, 0)
    lost = row(found, "10 categories, one loses 4%")
    assert lost["plain PASS"] > 0.7
    assert lost["PASS"] < 0.75
    assert lost["FAIL or warned"] > 0.8
    assert lost["every one PASS"] <= 0.05
    assert row(found, "10 categories, one loses 6%")["first FAIL"] > 0.85
    for good in ("10 categories, none loses", "10 categories, each loses 1%"):
        assert row(found, good)["FAIL"] <= 0.05


def test_looking_again_passes_more_often_unless_the_looks_are_planned() -> None:
    """On the same prompts: a planned look passes nothing that a plain one has not passed."""

    def passed(change: float, total: int, spending: Spending | None) -> set[int]:
        return {
            run
            for run in range(RUNS)
            if growing(np.random.default_rng(run), change, total, spending)
        }

    for change in (LIMIT, -0.005):
        once, plain = passed(change, 1, None), passed(change, 3, None)
        for spending in ("obrien-fleming", "pocock"):
            assert passed(change, 3, spending) < plain
    assert len(plain) > len(once) + RUNS // 10


def test_other_ways_to_look_again_end_in_a_verdict() -> None:
    """At 0 nearly all pass, extended as once advised or with fresh sets; at -4 % none."""
    for change, least, most in ((0.0, 8, 10), (-0.04, 0, 0)):
        for passes in (fresh(2), lambda g, c: as_advised(g, c, 2)):
            found = sum(passes(np.random.default_rng(run), change) for run in range(10))
            assert least <= found <= most


def test_the_same_seed_gives_the_same_figures() -> None:
    """Each row has a generator of its own, by its name: no other row changes it."""
    scenario = record(np.random.default_rng([3, 4]), 40, -0.01)
    again = record(np.random.default_rng([3, 4]), 40, -0.01)
    assert plain_outcome(scenario) == plain_outcome(again)
    assert scenario.candidate.tolist() == again.candidate.tolist()
    assert TABLES["coverage"](5, 1) == TABLES["coverage"](5, 1) != TABLES["coverage"](5, 2)


def test_the_command_prints_tables_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--runs", "2", "--tables", "coverage"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "Coverage of the bounds" in said
    assert "spread of log length 1.5" in said
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["seed"]) == (2, 0)
    assert len(found["tables"]["coverage"]["rows"]) == 8
