"""Categories have a limit of their own, and the named policy is told from a looser one."""

import dataclasses
from typing import Any

import pytest
from draftquant.validate.gate import GateReport, judge
from draftquant.validate.looks import Look
from draftquant.validate.policy import POLICIES, looser_than_release, resolve_policy
from handmade_replays import RELEASE, noisy, replay, spread

EVERY = dataclasses.replace(RELEASE, every_category_passes=True)


def judged(drop: int, noise: int, *, count: int = 30, policy: Any = RELEASE) -> GateReport:
    """270 prompts of category 'a' that lose nothing, and some of 'b' that lose `drop`."""
    categories = "a" * 270 + "b" * count
    baseline = replay(spread(600, 270) + spread(600, count), categories=categories)
    candidate = noisy(0, 4, 270) + noisy(drop, noise, count)
    return judge(baseline, replay(candidate, categories=categories), policy)


def test_a_category_that_fails_makes_the_whole_fail() -> None:
    """-4 % in a tenth of the prompts: the whole lost 0.4 %, and would pass."""
    report = judged(64, 4)
    assert report.change is not None
    assert report.change.lower > -0.01
    assert (report.verdict, report.exit_code) == ("FAIL", 1)
    assert "'b' (30 prompts) -4.00%" in report.reason
    assert [found.outcome for found in report.categories] == ["PASS", "FAIL"]
    assert "that category" in (report.action or "")


def test_a_category_below_its_least_number_is_named_and_not_judged() -> None:
    report = judged(64, 4, count=29)
    assert report.verdict == "PASS"
    assert [found.outcome for found in report.categories] == ["PASS", None]
    assert "categories below 30 prompts were not judged: b (29)" in report.warnings


def test_an_open_category_stops_a_pass_only_if_every_one_has_to() -> None:
    """-3.4 % measured, limit -3 % between the bounds."""
    report = judged(55, 60)
    assert report.categories[1].outcome == "INCONCLUSIVE"
    assert report.verdict == "PASS"
    assert any("category 'b' lost more than its 3%" in warning for warning in report.warnings)
    strict = judged(55, 60, policy=EVERY)
    assert (strict.verdict, strict.exit_code) == ("INCONCLUSIVE", 3)
    assert "every category has to pass: 'b' (30 prompts) -3.43%" in strict.reason
    assert strict.action == "Record a fresh set with more prompts of: b."
    assert judged(3, 4, policy=EVERY).verdict == "PASS"
    assert judged(64, 4, policy=EVERY).verdict == "FAIL"


def test_a_look_widens_the_bounds_of_categories_too() -> None:
    categories = "a" * 30
    baseline, candidate = spread(600, 30), noisy(10, 60, 30)
    look = Look(number=1, total=2, spending="pocock")
    report = judge(
        replay(baseline, categories=categories),
        replay(candidate, categories=categories),
        RELEASE,
        look=look,
    )
    assert report.change is not None
    assert report.categories[0].change is not None
    assert report.categories[0].change.confidence == report.change.confidence > 0.95


def test_release_is_looser_than_itself_in_nothing() -> None:
    assert looser_than_release(RELEASE) == ()
    assert looser_than_release(EVERY) == ()
    stricter = resolve_policy("release", max_relative_drop=0.005, confidence=0.99, min_prompts=60)
    assert looser_than_release(stricter) == ()
    assert looser_than_release(
        resolve_policy("screening", max_relative_drop=0.01, min_prompts=30)
    ) == ()  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_relative_drop": 0.02}, ("max_relative_drop 0.02 (release: 0.01)",)),
        ({"confidence": 0.9}, ("confidence 0.9 (release: 0.95)",)),
        ({"min_prompts": 29}, ("min_prompts 29 (release: 30)",)),
        (
            {"max_relative_drop": 0.05},
            ("max_relative_drop 0.05 (release: 0.01)", "max_category_drop 0.05 (release: 0.03)"),
        ),
    ],
)
def test_whatever_is_looser_than_release_is_said(
    changes: dict[str, Any], said: tuple[str, ...]
) -> None:
    policy = resolve_policy("release", **changes)
    assert looser_than_release(policy) == said
    report = judge(replay(spread(600)), replay(noisy(3, 4)), policy)
    assert report.looser_than_release == said
    assert f"looser than release: {', '.join(said)}" in report.warnings


def test_screening_is_looser() -> None:
    assert looser_than_release(POLICIES["screening"]) == (
        "max_relative_drop 0.03 (release: 0.01)",
        "min_prompts 10 (release: 30)",
    )
