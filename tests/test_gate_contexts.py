"""Context bins have limits of their own, and all bounds of parts hold together."""

import dataclasses
import json
from collections.abc import Sequence

import pytest
from draftquant.recipes.errors import DraftQuantError
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
from handmade_replays import BASELINE, RELEASE, noisy, replay, spread
from handmade_reports import document, text_of

Rows = Sequence[tuple[float, ...]]
NOTHING = (0, 0)


def long_replay(*bins: Rows, categories: str = "a") -> DraftReplay:
    """A replay whose prompts have these counts in each context bin, the shortest first."""
    by_prompt = list(zip(*bins, strict=True))
    whole = [tuple(map(sum, zip(*own, strict=True))) for own in by_prompt]
    made = replay(whole, categories=categories)
    prompts = tuple(
        dataclasses.replace(
            one,
            contexts=ContextCounts(
                bins=CONTEXT_BINS,
                counts=tuple(
                    AcceptanceCounts(histogram=histogram)
                    for histogram in (*own, *[NOTHING] * (5 - len(own)))
                ),
            ),
        )
        for one, own in zip(made.prompts, by_prompt, strict=True)
    )
    return dataclasses.replace(made, prompts=prompts)


def tenth(rows: Rows, reach: int = 40) -> Rows:
    """A tenth of the steps, of the first so many prompts."""
    return [
        (rejected // 10, accepted // 10) if i < reach else NOTHING
        for i, (rejected, accepted) in enumerate(rows)
    ]


def judged(
    drop: int, *, reach: int = 40, categories: str = "a", policy: Policy = RELEASE
) -> GateReport:
    """40 prompts that lose nothing below 1k, and `drop` of 600 in a tenth of their steps beyond."""
    short, count = spread(600), len(categories)
    long = tenth(spread(600), reach)
    lost = tenth(noisy(drop, 40), reach)
    assert count in {1, 2}
    return judge(
        long_replay(short, long, categories=categories),
        long_replay(noisy(0, 4), lost, categories=categories),
        policy,
    )


def test_a_bin_that_fails_makes_the_whole_fail() -> None:
    """-7 % in a tenth of the steps: the whole lost 0.7 %, and would pass."""
    report = judged(120)
    assert report.change is not None
    assert report.change.lower > -0.01
    assert report.verdict == "FAIL"
    assert report.reason.startswith(
        "With 95% confidence a context bin lost more than the limit of 3.00%: 'context 1k-4k' (40"
        " prompts) changed by -7."
    )
    assert "these lengths too: 'context 1k-4k'." in (report.action or "")
    assert [(one.category, one.outcome) for one in report.context_bins] == [
        ("context 0-1k", "PASS"),
        ("context 1k-4k", "FAIL"),
    ]
    assert report.categories == ()


def test_steps_that_lie_in_one_bin_are_judged_as_if_there_were_none() -> None:
    bins = judge(long_replay(spread(600)), long_replay(noisy(0, 4)), RELEASE)
    assert bins.context_bins == ()
    assert bins.context_edges == CONTEXT_BINS.edges
    plain = judge(replay(spread(600)), replay(noisy(0, 4)), RELEASE)
    assert (bins.verdict, bins.change, bins.warnings) == (
        plain.verdict,
        plain.change,
        plain.warnings,
    )


def test_bounds_of_all_judged_parts_hold_together() -> None:
    """Two bins: 97.5 % each; with two categories of 20 prompts, which are not judged: the same."""
    of_each = {one.change.confidence for one in judged(0).context_bins if one.change}
    assert [*of_each] == pytest.approx([0.975])
    report = judged(0, categories="ab")
    assert [one.change.confidence for one in report.parts.all if one.change] == pytest.approx(
        [0.975] * 4
    )
    smaller = dataclasses.replace(RELEASE, name="custom", min_category_prompts=20)
    report = judged(0, categories="ab", policy=smaller)
    assert [one.outcome for one in report.parts.all] == ["PASS"] * 4
    assert [one.change.confidence for one in report.parts.all if one.change] == pytest.approx(
        [0.9875] * 4
    )


def test_a_loss_that_95_percent_alone_would_fail_may_be_chance_in_one_of_several_bins() -> None:
    """The second bin's upper bound lies beyond the limit at 95 %, and not at 97.5 %."""
    short, drop = spread(600), 76
    rows = [tenth(spread(600)), tenth(noisy(drop, 110))]
    report = judge(long_replay(short, rows[0]), long_replay(noisy(0, 4), rows[1]), RELEASE)
    alone = judge(replay(list(rows[0])), replay(list(rows[1])), RELEASE)
    found = report.context_bins[1].change
    assert found is not None
    assert alone.change is not None
    assert found.log_ratio == alone.change.log_ratio
    assert alone.change.relative_bounds[1] < -0.03 < found.relative_bounds[1]
    assert (report.context_bins[1].outcome, report.verdict) == ("INCONCLUSIVE", "PASS")
    (said,) = [one for one in report.warnings if "lost more" in one]
    assert said.startswith("'context 1k-4k' lost more than its limit of 3%")


def test_a_bin_of_few_prompts_is_named_and_one_that_certainly_lost_is_no_pass() -> None:
    assert judged(0, reach=20).verdict == "PASS"
    report = judged(0, reach=20)
    assert report.context_bins[1].outcome is None
    assert any("'context 1k-4k' are of an effective sample size" in w for w in report.warnings)
    lost = judged(150, reach=20)
    assert lost.context_bins[1].certainly_lost
    assert lost.verdict == "INCONCLUSIVE"
    assert "a context bin with fewer than 30 prompts in effect lost more than 3.00%" in lost.reason


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_prompt_that_hardly_reaches_a_bin_has_a_part_of_a_step_there(share: float) -> None:
    """Expected and weighted steps: one row behind an edge is reached with some probability."""

    def parts(rows: Rows) -> Rows:
        return [tuple(count / 60 * share for count in row) for row in tenth(rows)]

    short = spread(600)
    report = judge(
        long_replay(short, parts(spread(600))),
        long_replay(noisy(0, 4), parts(noisy(120, 40))),
        RELEASE,
    )
    (_, found), whole = report.context_bins, judged(120).context_bins[1]
    assert (found.num_prompts, found.outcome) == (40, "FAIL")
    assert found.change is not None
    assert whole.change is not None
    assert found.change.relative_bounds == pytest.approx(whole.change.relative_bounds)
    ((_, read),) = parse_report(text_of(report), "r.json").comparisons
    assert read.context_bins == report.context_bins


def test_a_thousandth_of_a_step_says_nothing() -> None:
    rows = [(1e-4, 1e-4)] * 40
    report = judge(long_replay(spread(600), rows), long_replay(noisy(0, 4), rows), RELEASE)
    assert report.context_bins == ()


def test_every_part_passes_where_that_is_asked() -> None:
    every = dataclasses.replace(RELEASE, name="custom", every_category_passes=True)
    assert judged(0, policy=every).verdict == "PASS"
    report = judged(50, policy=every)
    assert report.verdict == "INCONCLUSIVE"
    assert "every context bin has to pass" in report.reason


def test_a_baseline_that_falls_with_the_context_is_named() -> None:
    falling = tenth(spread(200))
    report = judge(long_replay(spread(600), falling), long_replay(noisy(0, 4), falling), RELEASE)
    (said,) = [one for one in report.warnings if "baseline itself" in one]
    assert said.startswith("the baseline itself accepts 1.20 in 'context 1k-4k' and 1.60 in")


def test_a_report_keeps_its_bins_and_no_edited_one_is_believed() -> None:
    told = text_of(judged(120))
    ((_, found),) = parse_report(told, "r.json").comparisons
    assert [own.outcome for own in found.context_bins] == ["PASS", "FAIL"]
    assert found.context_bins[1].is_context_bin
    plain = json.loads(told)
    plain["context_bins"][1]["outcome"] = "PASS"
    with pytest.raises(DraftQuantError, match=r"context_bins\[1\].outcome: expected 'FAIL'"):
        parse_report(json.dumps(plain), "r.json")


def test_prompts_that_no_bin_counts_are_named_and_those_without_steps_are_none() -> None:
    rows, others = [tenth(spread(600)), tenth(noisy(0, 40))], [spread(600), noisy(0, 4)]
    short = [[*one[:-1], NOTHING] for one in (*others, *rows)]
    report = judge(long_replay(short[0], short[2]), long_replay(short[1], short[3]), RELEASE)
    assert report.num_short_prompts == 1
    ((_, read),) = parse_report(text_of(report), "r.json").comparisons
    assert [*read.warnings] == [*report.warnings]
    assert not any("no context bin" in warning for warning in report.warnings)

    for reach in (40, 0):  # with a second bin, and with all known steps in one
        both = [
            long_replay(one, tenth(two, reach)) for one, two in zip(others, others, strict=True)
        ]
        both = [
            dataclasses.replace(
                one,
                prompts=(*(dataclasses.replace(p, contexts=None) for p in one.prompts[:3]),
                         *one.prompts[3:]),
            )
            for one in both
        ]  # fmt: skip
        (said,) = [one for one in judge(*both, RELEASE).warnings if "no context bin" in one]
        assert said.startswith("no context bin counts 3 of the 40 prompts: where their verify")


def test_every_form_of_a_report_shows_the_bins() -> None:
    made = document(judged(120))
    for text in (page(made), markdown(made), junit(made)):
        assert "context 1k-4k" in text
    assert "Acceptance length by tokens before the verify step" in page(made)
    assert "at 97.5% each" in page(made)
    assert "at 97.5% each" in markdown(made)
    assert "before the verify step" not in page(document(judge(*[replay(BASELINE)] * 2, RELEASE)))


def test_a_reader_sees_the_curve(capsys: pytest.CaptureFixture[str]) -> None:
    print_gate(judged(120))
    said = capsys.readouterr().out
    assert "context 1k-4k" in said
    assert "acceptance length by tokens before the verify step: 0-1k 1.6020 -> 1.6020" in said
    assert "Bounds of categories and context bins are one-sided, at 97.5% each" in said
    print_replays([long_replay(spread(600), tenth(spread(600)))])
    assert "Acceptance length by tokens before the verify step" in capsys.readouterr().out
    print_replays([long_replay(spread(600))])
    assert "before the verify step" not in capsys.readouterr().out
