"""Boundaries of repeated looks: as published, and as simulated; what `--look` says and asks."""

import math

import numpy as np
import pytest
from draftquant.recipes.errors import GateError
from draftquant.validate.judging.judgement import judge
from draftquant.validate.judging.policy import (
    MAX_LOOKS,
    Look,
    Spending,
    boundaries,
    crossing_probability,
    parse_look,
)
from draftquant.validate.report.html_report import page
from handmade_replays import BASELINE, RELEASE, noisy, replay, spread
from handmade_reports import document
from scipy import stats

# Jennison & Turnbull (2000), tables 2.1 and 2.3: two-sided 0.10 and 0.05, which are one-sided 0.05
# and 0.025 but for the chance of crossing both sides, below 1e-4.
PUBLISHED: list[tuple[Spending, float, dict[int, float]]] = [
    ("pocock", 0.95, {2: 1.875, 3: 1.992, 4: 2.067, 5: 2.122}),
    ("pocock", 0.975, {2: 2.178, 3: 2.289, 4: 2.361, 5: 2.413}),
    ("obrien-fleming", 0.95, {2: 1.678, 3: 1.710, 4: 1.733, 5: 1.751}),
    ("obrien-fleming", 0.975, {2: 1.977, 3: 2.004, 4: 2.024, 5: 2.040}),
]


def test_the_constants_are_the_published_ones() -> None:
    spending: Spending
    for spending, confidence, published in PUBLISHED:
        for total, constant in published.items():
            found = boundaries(total, spending, confidence)
            assert found[-1] == pytest.approx(constant, abs=6e-4)
            looks = range(1, total + 1)
            shape = [math.sqrt(total / i) if spending == "obrien-fleming" else 1 for i in looks]
            assert found == pytest.approx([found[-1] * factor for factor in shape])
    for spending in ("pocock", "obrien-fleming"):
        assert boundaries(1, spending, 0.95) == (pytest.approx(1.6448536),)
        assert Look(number=1, total=1, spending=spending).adjusted_confidence(0.95) == (
            pytest.approx(0.95)
        )


def test_a_walk_crosses_as_often_as_computed() -> None:
    """Uneven boundaries, 200,000 walks: standard error 0.0008."""
    boundary = [1.2, 2.0, 1.5]
    steps = np.random.default_rng(0).standard_normal((200_000, 3))
    z = steps.cumsum(axis=1) / np.sqrt([1, 2, 3])
    assert crossing_probability(boundary) == pytest.approx((z > boundary).any(1).mean(), abs=0.003)
    assert crossing_probability([1.0]) == pytest.approx(float(stats.norm.sf(1.0)), abs=1e-12)


@pytest.mark.parametrize("spending", ["pocock", "obrien-fleming"])
def test_all_looks_together_err_as_often_as_one(spending: Spending) -> None:
    for total, confidence in ((2, 0.9), (MAX_LOOKS, 0.95), (MAX_LOOKS, 0.9999)):
        found = boundaries(total, spending, confidence)
        assert crossing_probability(found) == pytest.approx(1 - confidence, rel=1e-5)
        adjusted = [
            Look(number=i, total=total, spending=spending).adjusted_confidence(confidence)
            for i in range(1, total + 1)
        ]
        assert all(confidence < one < 1 for one in adjusted)
        assert adjusted == sorted(adjusted, reverse=True)


def test_a_look_is_one_of_several() -> None:
    assert parse_look(None, None) is None
    assert parse_look("2/3", None) == Look(number=2, total=3, spending="obrien-fleming")
    assert parse_look("10/10", "pocock") == Look(number=10, total=10, spending="pocock")
    for text in ("", "2", "0/2", "3/2", "1/11", "a/b", "1/2/3", "-1/2", "²/3"):
        with pytest.raises(GateError, match="--look: expected i/n with 1 <= i <= n <= 10, got"):
            parse_look(text, None)
    with pytest.raises(GateError, match="--spending: needs --look, got none"):
        parse_look(None, "pocock")


def test_the_gate_judges_by_the_bounds_of_the_look() -> None:
    """Both pass alone and not at a first look; at the last of three the narrower one does."""
    for noise, at_last in ((25, "PASS"), (26, "INCONCLUSIVE")):
        verdicts = {
            look: judge(
                replay(BASELINE),
                replay(noisy(9, noise)),
                RELEASE,
                look=parse_look(look, "obrien-fleming"),
            ).verdict
            for look in ("1/3", "3/3")
        }
        assert verdicts == {"1/3": "INCONCLUSIVE", "3/3": at_last}
        assert judge(replay(BASELINE), replay(noisy(9, noise)), RELEASE).verdict == "PASS"


def test_the_report_names_the_look_and_what_comes_next() -> None:
    look = Look(number=1, total=3, spending="pocock")
    report = judge(replay(BASELINE), replay(noisy(10, 60)), RELEASE, look=look)
    assert report.change is not None
    assert report.change.confidence == pytest.approx(float(stats.norm.cdf(1.99219)), abs=1e-6)
    assert "one-sided 97.68% bounds" in report.reason
    assert any("interim analysis 1 of 3 (pocock)" in warning for warning in report.warnings)
    assert report.action is not None
    ways = report.action.splitlines()
    assert "traces merge TRACES FRESH --out ALL" in ways[1]
    assert ways[2].endswith("--traces ALL --look 2/3 --spending pocock")


def test_bounds_of_two_prompts_at_a_first_look_are_beyond_all_bounds_and_are_said() -> None:
    """Student's quantile of one degree of freedom at 1 - 1e-7 is millions."""
    rows = spread(600, 60), noisy(0, 4, 58) + noisy(100, 90, 2)
    drafts = [replay(each, categories="a" * 58 + "bb") for each in rows]
    report = judge(*drafts, RELEASE, look=parse_look("1/10", None))
    assert report.categories[1].change is not None
    assert report.categories[1].change.upper > 1000
    read = document(report)
    assert read.judgement == report
    assert page(read)
