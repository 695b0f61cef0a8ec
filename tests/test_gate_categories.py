"""Categories have a limit of their own, and the named policy is told from a looser one."""

import dataclasses
from typing import Any

import pytest
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.judging.policy import POLICIES, Look, looser_than_release, resolve_policy
from handmade_replays import BASELINE, RELEASE, noisy, replay, spread

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
    assert report.reason.startswith(
        "With 95% confidence a category lost more than the limit of 3.00%: 'b' (30 prompts) changed"
        " by -4.00%, bounds "
    )
    assert [found.outcome for found in report.categories] == ["PASS", "FAIL"]
    assert (report.action or "").startswith("Calibrate on other prompts of 'b' too.\n")


def test_a_category_below_its_least_number_is_named_and_not_judged() -> None:
    report = judged(64, 4, count=29)
    assert [found.outcome for found in report.categories] == ["PASS", None]
    assert "1 category has fewer than 30 prompts and is not judged alone: b" in report.warnings
    assert judged(64, 300, count=29).verdict == "PASS"


def test_a_small_category_that_certainly_lost_is_named() -> None:
    """-4 % in each of 29 prompts, limit -3 %: no PASS, and no FAIL by so few."""
    report = judged(64, 4, count=29)
    assert (report.verdict, report.exit_code) == ("INCONCLUSIVE", 3)
    assert (
        "a category with fewer than 30 prompts lost more than 3.00%, more than chance"
        in report.reason
    )
    assert "'b' (29 prompts) changed by -3.99%" in report.reason
    assert [found.certainly_lost for found in report.categories] == [False, True]
    assert (report.action or "").startswith(
        "Record fresh prompts, with at least 30 of 'b': draftquant record "
    )
    assert judged(46, 4, count=29).verdict == "PASS"  # -2.9 %
    assert judged(64, 4, count=4).verdict == "PASS"  # too few even for that


def test_the_more_small_categories_the_surer_one_has_to_be() -> None:
    """-3.4 % +- 0.9 % in 12 prompts: beyond -3 % at 95 % alone, and not as one of ten."""

    def lost(others: int) -> list[str]:
        names = "a" * 270 + "b" * 12 + "".join(chr(ord("c") + i) for i in range(others))
        count = len(names)
        candidate = noisy(0, 4, 270) + noisy(55, 9, 12) + noisy(0, 4, others)
        report = judge(
            replay(spread(600, count), categories=names),
            replay(candidate, categories=names),
            RELEASE,
        )
        return [found.category for found in report.categories if found.certainly_lost]

    assert lost(0) == ["b"]
    assert lost(9) == []


def test_a_sole_category_is_the_whole_and_no_row() -> None:
    """-4 %: a FAIL of the whole, said of the whole."""
    report = judge(replay(BASELINE), replay(noisy(64, 4)), RELEASE)
    assert report.verdict == "FAIL"
    assert report.reason.startswith(
        "With 95% confidence the drop is larger than the limit of 1.00%: "
    )
    assert "the mean acceptance length changed by -4.00%" in report.reason
    assert report.categories == ()


def test_where_the_whole_fails_it_leads() -> None:
    report = judge(
        replay(spread(600, 80), categories="ab"), replay(noisy(64, 4, 80), categories="ab"), RELEASE
    )
    assert report.verdict == "FAIL"
    assert report.reason.startswith(
        "With 95% confidence the drop is larger than the limit of 1.00%: "
    )
    assert "the mean acceptance length changed by -4.00%" in report.reason
    assert report.reason.endswith(" Categories beyond their own limit: 'a', 'b'.")


def test_an_open_category_stops_a_pass_only_if_every_one_has_to() -> None:
    """-3.4 % measured, limit -3 % between the bounds."""
    report = judged(55, 60)
    assert report.categories[1].outcome == "INCONCLUSIVE"
    assert report.verdict == "PASS"
    assert any(
        "category 'b' lost more than its limit of 3%" in warning for warning in report.warnings
    )
    strict = judged(55, 60, policy=EVERY)
    assert (strict.verdict, strict.exit_code) == ("INCONCLUSIVE", 3)
    assert "a drop is larger than 3.00%: 'b' (30 prompts) changed by -3.43%" in strict.reason
    assert (strict.action or "").startswith("Record fresh prompts, with more of 'b': ")
    assert judged(3, 4, policy=EVERY).verdict == "PASS"
    assert judged(64, 4, policy=EVERY).verdict == "FAIL"


def test_a_look_widens_the_bounds_of_categories_too() -> None:
    categories = "ab"
    baseline, candidate = spread(600, 60), noisy(10, 60, 60)
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
    ) == ("record_required False (release: True)",)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_relative_drop": 0.02}, ("max_relative_drop 0.02 (release: 0.01)",)),
        ({"confidence": 0.9}, ("confidence 0.9 (release: 0.95)",)),
        ({"min_prompts": 29}, ("min_prompts 29 (release: 30)",)),
        ({"unrecorded": True}, ("record_required False (release: True)",)),
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
    lead = "the limits are looser than those of the policy 'release'"
    assert f"{lead}: {', '.join(said)}" in report.warnings


def test_screening_is_looser() -> None:
    assert looser_than_release(POLICIES["screening"]) == (
        "max_relative_drop 0.03 (release: 0.01)",
        "min_prompts 10 (release: 30)",
        "record_required False (release: True)",
    )
