"""Categories and context bins have a limit of their own, and bounds of bins hold together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from draftquant.scripts.verbs.gate import print_gate
from draftquant.scripts.verbs.replay import print_replays
from draftquant.validate.counting.acceptance_counts import (
    CONTEXT_BINS,
    AcceptanceCounts,
    ContextCounts,
)
from draftquant.validate.counting.draft_counts import DraftReplay
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.judging.policy import Policy
from draftquant.validate.report.document import parse_report
from draftquant.validate.report.html_report import page
from draftquant.validate.report.report_texts import junit, markdown
from handmade_replays import RELEASE, noisy, replay, spread
from handmade_reports import document, text_of

Rows = Sequence[tuple[float, ...]]
NOTHING = (0, 0)
EVERY = dataclasses.replace(RELEASE, name="custom", every_category_passes=True)

# ---- Categories


def of_b(drop: int, noise: int, *, count: int = 30, policy: Policy = RELEASE) -> GateReport:
    """270 prompts of category 'a' that lose nothing, and some of 'b' that lose `drop`."""
    names = "a" * 270 + "b" * count
    candidate = noisy(0, 4, 270) + noisy(drop, noise, count)
    baseline = replay(spread(600, 270) + spread(600, count), categories=names)
    return judge(baseline, replay(candidate, categories=names), policy)


def test_a_category_has_a_limit_of_its_own() -> None:
    """-4 % in a tenth of the prompts: the whole lost 0.4 %, and would pass."""
    rows: list[tuple[int, int, dict[str, Any], str, str | None, str]] = [
        (64, 4, {}, "FAIL", "FAIL", "a category lost more than the limit of 3.00%: 'b' (30"),
        (64, 4, {"count": 29}, "INCONCLUSIVE", None, "fewer than 30 prompts lost more than 3.00%"),
        (64, 300, {"count": 29}, "PASS", None, ""),
        (46, 4, {"count": 29}, "PASS", None, ""),  # -2.9 %
        (64, 4, {"count": 4}, "PASS", None, ""),  # too few even for that
        (55, 60, {}, "PASS", "INCONCLUSIVE", ""),
        (55, 60, {"policy": EVERY}, "INCONCLUSIVE", "INCONCLUSIVE", "every category has to pass"),
        (3, 4, {"policy": EVERY}, "PASS", "PASS", ""),
        (64, 4, {"policy": EVERY}, "FAIL", "FAIL", "Calibrate on other prompts of 'b' too."),
    ]  # fmt: skip
    for drop, noise, changes, verdict, of_part, said in rows:
        report = of_b(drop, noise, **changes)
        assert (report.verdict, report.categories[1].outcome) == (verdict, of_part)
        assert said in f"{report.reason}\n{report.action}"
        unjudged = "1 category has fewer than 30 prompts and is not judged alone: b"
        assert (unjudged in report.warnings) == (of_part is None)
        chance = "category 'b' lost more than its limit of 3%" in "".join(report.warnings)
        assert chance == (of_part == "INCONCLUSIVE")


def test_the_more_small_categories_the_surer_one_has_to_be() -> None:
    """-3.4 % +- 0.9 % in 12 prompts: beyond -3 % at 95 % alone, and not as one of ten."""
    for others, lost in ((0, ["b"]), (9, [])):
        names = "a" * 270 + "b" * 12 + "".join(chr(ord("c") + i) for i in range(others))
        candidate = noisy(0, 4, 270) + noisy(55, 9, 12) + noisy(0, 4, others)
        rows = spread(600, len(names)), candidate
        report = judge(*(replay(each, categories=names) for each in rows), RELEASE)
        assert [one.category for one in report.categories if one.certainly_lost] == lost


def test_where_the_whole_fails_it_leads() -> None:
    """-4 %; a sole category is the whole, and no row."""
    rows = spread(600, 80), noisy(64, 4, 80)
    report = judge(*(replay(each, categories="ab") for each in rows), RELEASE)
    assert report.verdict == "FAIL"
    assert report.reason.startswith("With 95% confidence the drop is larger than the limit of 1.00")
    assert report.reason.endswith(" Categories beyond their own limit: 'a', 'b'.")
    found = report.categories[0]
    assert found.baseline_mean_acceptance_length == pytest.approx(1.602)
    assert 1.53 < found.candidate_mean_acceptance_length < 1.55
    assert judge(*map(replay, rows), RELEASE).categories == ()


# ---- Context bins


def long_replay(*bins: Rows, categories: str = "a") -> DraftReplay:
    """A replay whose prompts have these counts in each context bin, the shortest first."""
    by_prompt = list(zip(*bins, strict=True))
    whole = [tuple(map(sum, zip(*own, strict=True))) for own in by_prompt]
    made = replay(whole, categories=categories)
    prompts = []
    for one, own in zip(made.prompts, by_prompt, strict=True):
        rows = (AcceptanceCounts(histogram=h) for h in (*own, *[NOTHING] * (5 - len(own))))
        contexts = ContextCounts(bins=CONTEXT_BINS, counts=tuple(rows))
        prompts.append(dataclasses.replace(one, contexts=contexts))
    return dataclasses.replace(made, prompts=tuple(prompts))


def tenth(rows: Rows, reach: int = 40) -> Rows:
    """A tenth of the steps, of the first so many prompts."""
    return [
        (rejected // 10, accepted // 10) if i < reach else NOTHING
        for i, (rejected, accepted) in enumerate(rows)
    ]


def judged(
    drop: int, *, reach: int = 40, categories: str = "a", policy: Policy = RELEASE, noise: int = 40
) -> GateReport:
    """40 prompts that lose nothing below 1k, and `drop` of 600 in a tenth of their steps beyond."""
    long, lost = tenth(spread(600), reach), tenth(noisy(drop, noise), reach)
    return judge(
        long_replay(spread(600), long, categories=categories),
        long_replay(noisy(0, 4), lost, categories=categories),
        policy,
    )


def test_a_bin_that_fails_makes_the_whole_fail() -> None:
    """-7 % in a tenth of the steps: the whole lost 0.7 %, and would pass."""
    report = judged(120)
    assert report.change is not None
    assert report.change.lower > -0.01
    assert report.verdict == "FAIL"
    assert "a context bin lost more than the limit of 3.00%: 'context 1k-4k'" in report.reason
    assert "these lengths too: 'context 1k-4k'." in (report.action or "")
    assert [one.outcome for one in report.context_bins] == ["PASS", "FAIL"]
    ((_, read),) = parse_report(text_of(report), "r.json").comparisons
    assert read.context_bins == report.context_bins
    edited = text_of(report).replace('"outcome": "FAIL"', '"outcome": "PASS"')
    with pytest.raises(Exception, match=r"context_bins\[1\].outcome: expected 'FAIL'"):
        parse_report(edited, "r.json")


def test_steps_that_lie_in_one_bin_are_judged_as_if_there_were_none() -> None:
    bins = judge(long_replay(spread(600)), long_replay(noisy(0, 4)), RELEASE)
    plain = judge(replay(spread(600)), replay(noisy(0, 4)), RELEASE)
    assert (bins.context_bins, bins.context_edges) == ((), CONTEXT_BINS.edges)
    assert (bins.change, bins.warnings) == (plain.change, plain.warnings)
    rows = [(1e-4, 1e-4)] * 40  # less than a thousandth of a step says nothing
    almost = judge(long_replay(spread(600), rows), long_replay(noisy(0, 4), rows), RELEASE)
    assert almost.context_bins == ()


def test_bounds_of_all_judged_parts_hold_together() -> None:
    """Two bins: 97.5 % each; two categories of 20 prompts count where they are judged."""
    smaller = dataclasses.replace(RELEASE, name="custom", min_category_prompts=20)
    for changes, of_each in (
        ({}, [0.975] * 2), ({"categories": "ab"}, [0.975] * 4),
        ({"categories": "ab", "policy": smaller}, [0.9875] * 4),
    ):  # fmt: skip
        parts = judged(0, **changes).parts.all  # type: ignore[arg-type]
        assert [one.change.confidence for one in parts if one.change] == pytest.approx(of_each)


def test_a_bin_of_few_prompts_is_named_and_one_that_certainly_lost_is_no_pass() -> None:
    report, lost = judged(0, reach=20), judged(150, reach=20)
    assert (report.verdict, report.context_bins[1].outcome) == ("PASS", None)
    assert any("'context 1k-4k' are of an effective sample size" in w for w in report.warnings)
    assert (lost.verdict, lost.context_bins[1].certainly_lost) == ("INCONCLUSIVE", True)
    assert "a context bin with fewer than 30 prompts in effect lost more than 3.00%" in lost.reason
    assert "every context bin has to pass" in judged(50, policy=EVERY).reason


def test_a_baseline_that_falls_with_the_context_is_named() -> None:
    falling = tenth(spread(200))
    report = judge(long_replay(spread(600), falling), long_replay(noisy(0, 4), falling), RELEASE)
    (said,) = [one for one in report.warnings if "baseline itself" in one]
    assert said.startswith("the baseline itself accepts 1.20 in 'context 1k-4k' and 1.60 in")


def test_prompts_that_no_bin_counts_are_named_and_those_without_steps_are_none() -> None:
    wholes = [spread(600), noisy(0, 4)]
    short = [long_replay([*one[:-1], NOTHING], [*tenth(one)[:-1], NOTHING]) for one in wholes]
    report = judge(*short, RELEASE)
    assert report.num_short_prompts == 1
    assert not any("no context bin" in warning for warning in report.warnings)
    for reach in (40, 0):  # with a second bin, and with all known steps in one
        both = []
        for one in wholes:
            made = long_replay(one, tenth(one, reach))
            placeless = [dataclasses.replace(p, contexts=None) for p in made.prompts[:3]]
            both.append(dataclasses.replace(made, prompts=(*placeless, *made.prompts[3:])))
        (said,) = [one for one in judge(*both, RELEASE).warnings if "no context bin" in one]
        assert said.startswith("no context bin counts 3 of the 40 prompts: where their verify")


def test_every_form_of_a_report_shows_the_bins(capsys: pytest.CaptureFixture[str]) -> None:
    made = document(judged(120))
    assert "context 1k-4k" in junit(made)
    assert "Acceptance length by tokens before the verify step" in page(made)
    print_gate(judged(120))
    said = capsys.readouterr().out
    assert "acceptance length by tokens before the verify step: 0-1k 1.6020 -> 1.6020" in said
    for text in (page(made), markdown(made), said):
        assert "at 97.5% each" in text
    for bins, shown in (((tenth(spread(600)),), True), ((), False)):
        print_replays([long_replay(spread(600), *bins)])
        assert ("before the verify step" in capsys.readouterr().out) == shown
