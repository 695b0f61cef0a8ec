"""What the gate counts as a prompt: copies, clusters, long ones, and steps enough in each."""

import dataclasses
from typing import Any

import pytest
from draftquant.recipes.errors import GateError
from draftquant.validate.counting.draft_counts import DraftReplay
from draftquant.validate.judging.judgement import judge
from draftquant.validate.report.document import document_text, parse_report
from draftquant.validate.report.html_report import page
from draftquant.validate.report.report_texts import markdown
from handmade_replays import BASELINE, FIGURES, RELEASE, noisy, replay, spread
from handmade_reports import document, mapping_of


def clustered(draft: DraftReplay, clusters: list[str]) -> DraftReplay:
    both = zip(draft.prompts, clusters, strict=True)
    return dataclasses.replace(
        draft, prompts=tuple(dataclasses.replace(one, cluster=name) for one, name in both)
    )


def test_one_prompt_under_forty_names_is_one_prompt() -> None:
    """A draft that loses 4.8 %, on one prompt: without clusters both bounds are the change."""
    drafts = (replay(rows, texts=[7] * 40) for rows in ([(400, 600)] * 40, [(477, 523)] * 40))
    report = judge(*drafts, RELEASE)
    assert (report.verdict, report.change) == ("INCONCLUSIVE", None)
    assert (report.num_prompts, report.num_copies) == (1, 39)
    assert report.warnings[0].startswith("39 of the prompts are copies of others: 1 ")


def test_copies_narrow_no_bound_and_are_no_short_prompts() -> None:
    """Ten copies of each of 30 prompts say what the 30 say."""
    once = judge(replay(spread(600, 30)), replay(noisy(10, 60, 30)), RELEASE)
    texts = [i % 30 for i in range(300)]
    rows = spread(600, 30) * 10, noisy(10, 60, 30) * 10
    copied = judge(*(replay(each, texts=texts) for each in rows), RELEASE)
    assert once.change is not None
    assert copied.change is not None
    assert dataclasses.astuple(copied.change) == pytest.approx(dataclasses.astuple(once.change))
    assert (copied.num_prompts, copied.num_copies, once.num_copies) == (30, 270, 0)
    assert not any("copies" in warning for warning in once.warnings)
    texts, short = [0, 0, 0, *range(1, 38)], [*spread(600, 39), (0, 0)]
    report = judge(replay(short, texts=texts), replay(short, texts=texts), RELEASE)
    assert (report.num_prompts, report.num_copies, report.num_short_prompts) == (37, 2, 1)
    assert "1 of the 40 prompts is left out, too short for a verify step" in report.warnings


def test_copies_in_several_categories_count_in_each() -> None:
    """Prompt i is recorded as 'a', 'b' and 'a' again: 30 distinct ones in the whole and in each."""
    texts = [i // 3 for i in range(90)]
    rows = ([h for h in each for _ in range(3)] for each in (spread(600, 30), noisy(3, 4, 30)))
    report = judge(*(replay(each, categories="aba", texts=texts) for each in rows), RELEASE)
    assert [report.num_prompts, *(one.num_prompts for one in report.categories)] == [30, 30, 30]
    errors = [one.change.standard_error for one in (report, *report.categories) if one.change]
    assert errors == [pytest.approx(errors[0])] * 3


def test_a_cluster_counts_as_one_prompt() -> None:
    """Four prompts in nine near copies each pass as 36, and are four."""
    baseline, candidate = replay(spread(600, 36)), replay(noisy(3, 4, 36))
    assert judge(baseline, candidate, RELEASE).verdict == "PASS"
    near = [clustered(each, [f"c{i % 4}" for i in range(36)]) for each in (baseline, candidate)]
    report = judge(*near, RELEASE)
    assert report.verdict == "INCONCLUSIVE"
    assert "4 clusters of prompts have an effective sample size of 4.0" in report.reason
    assert (report.num_prompts, report.num_clusters, report.num_copies) == (36, 4, 0)
    assert report.change is not None
    assert report.change.num_prompts == 4
    assert report.warnings[0].startswith("the 36 distinct prompts form 4 clusters")
    for form in (markdown, page):
        assert "4 (36 recorded)" in form(document(report))


def test_clusters_that_were_chosen_by_the_counts_narrow_no_bound() -> None:
    """Losers paired with gainers: alone these are bounds of hardly any width."""
    for drop in (10, 22):
        drafts = replay(spread(600, 100)), replay(noisy(drop, 60, 100))
        alone = judge(*drafts, RELEASE)
        pairs = [f"c{i // 2}" for i in range(100)]
        report = judge(*(clustered(each, pairs) for each in drafts), RELEASE)
        assert alone.verdict == report.verdict == "INCONCLUSIVE"
        assert alone.change is not None
        assert report.change is not None
        assert report.change.relative_bounds == alone.change.relative_bounds
        assert (report.num_clusters, report.change.effective_num_prompts) == (50, 50.0)
        assert "the lower one is that without, the upper one that without" in report.warnings[1]
        assert document(report).judgement == report


def test_honest_clusters_widen_the_bounds() -> None:
    """Each shares its change. What a report says without `alike` is read as it was."""
    drafts = [
        clustered(each, [f"c{i % 2}{i // 20}" for i in range(100)])
        for each in (replay(spread(600, 100)), replay(noisy(3, 60, 100)))
    ]
    report = judge(*drafts, dataclasses.replace(RELEASE, name="custom", min_prompts=5))
    assert report.warnings[2].endswith("lower one is that with, the upper one that with them")
    mapping = mapping_of(report)
    for prompt in mapping["prompts"]:
        assert prompt.pop("alike") == ""
    assert parse_report(document_text(mapping), "G").judgement.change == report.change


@pytest.mark.parametrize(("count", "lost", "clusters", "verdict", "outcome"), [
    (40, (80, 8), lambda i: i, "FAIL", "FAIL"),
    (40, (80, 8), lambda i: i // 2, "INCONCLUSIVE", None),
    (80, (62, 60), lambda i: (i % 2, i // 4), "INCONCLUSIVE", "INCONCLUSIVE"),
])  # fmt: skip
def test_declared_clusters_hide_no_category(
    count: int, lost: tuple[int, int], clusters: Any, verdict: str, outcome: str | None
) -> None:
    """-5 % in 40 prompts fails; as 20 clusters they are too few, and 40 of two may be chance."""
    names = [""] * 9 * count + [f"c{clusters(i)}" for i in range(count)]
    rows = spread(600, 10 * count), noisy(0, 4, 9 * count) + noisy(*lost, count)
    both = (replay(each, categories="a" * 9 * count + "b" * count) for each in rows)
    report = judge(*(clustered(each, names) for each in both), RELEASE)
    assert (report.verdict, report.categories[1].outcome) == (verdict, outcome)
    few = "fewer than 30 prompts, or without the declared clusters, lost more than 3.00%, more than"
    assert (f"passes as a whole, but a category with {few}" in report.reason) == (verdict != "FAIL")


def test_what_suggests_that_prompts_are_alike_is_said() -> None:
    traces = dataclasses.replace(FIGURES, num_near_duplicates=7)
    made = replay(BASELINE, traces=traces)
    named = (dataclasses.replace(p, id=f"doc{i // 5}-{i % 5}") for i, p in enumerate(made.prompts))
    made = dataclasses.replace(made, prompts=tuple(named))
    said = "\n".join(judge(made, made, RELEASE).warnings)
    assert "The ids look like 8 groups (doc0, doc1, doc2, ...). If prompts" in said
    assert "7 distinct prompts hardly differ" in said
    assert "accepted the same number of tokens on every prompt" in said
    assert judge(replay(BASELINE), replay(noisy(3, 4)), RELEASE).warnings == ()


def test_a_change_without_spread_is_no_measurement() -> None:
    """The same counts lost in each of forty; other steps of as many tokens are no change."""
    report = judge(replay([(400, 600)] * 40), replay([(405, 595)] * 40), RELEASE)
    assert report.verdict == "ANOMALOUS"
    assert "Each of the 40 prompts changed by the same -0.31%" in report.reason
    one_differs: list[tuple[int, ...]] = [(405, 595)] * 39 + [(404, 596)]
    assert judge(replay([(400, 600)] * 40), replay(one_differs), RELEASE).verdict == "PASS"
    drafts = replay([(20, 30, 40, 50)] * 40), replay([(21, 28, 41, 50)] * 40)
    assert judge(*drafts, RELEASE).verdict == "PASS"


def test_few_long_prompts_are_few_prompts() -> None:
    """30 of 1000 steps and 10 of 20000: (230e3)^2 / (30e6 + 4e9) = 13.1 of 40."""
    lengthen = [1] * 30 + [20] * 10
    drafts = [
        replay([(a * n, b * n) for (a, b), n in zip(rows, lengthen, strict=True)])
        for rows in (spread(600), noisy(3, 4))
    ]
    report = judge(*drafts, RELEASE)
    assert report.change is not None
    assert report.change.effective_num_prompts == pytest.approx(230e3**2 / 4.03e9)
    assert report.verdict == "INCONCLUSIVE"
    assert "an effective sample size of 13.1, because a few" in report.reason
    assert report.required_num_prompts is not None
    assert report.required_num_prompts.if_unchanged == 92  # 30 * 40 / 13.13
    assert judge(*drafts, dataclasses.replace(RELEASE, min_prompts=13)).verdict == "PASS"


def test_a_k_that_leaves_hardly_any_step_is_refused() -> None:
    """399 steps in 40 prompts, one of them too short for any."""
    few = [(0, 0), (4, 5), *[(4, 6)] * 37, (8, 12)]
    with pytest.raises(GateError, match=r"K = 1 leaves 10\.0 verify steps .* at least 10") as got:
        judge(replay(few), replay(few), RELEASE)
    assert "longer continuations" in got.value.fix
    enough = [(0, 0), (4, 6), *[(4, 6)] * 37, (8, 12)]
    assert judge(replay(enough), replay(enough), RELEASE).num_short_prompts == 1
