"""Categories and context bins have own limits; what counts as a prompt: copies, clusters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from draftquant.api import DraftReplay
from draftquant.recipes.errors import GateError
from draftquant.scripts.verbs.gate import print_gate
from draftquant.scripts.verbs.replay import print_replays
from draftquant.validate.counting.acceptance_counts import (
    CONTEXT_BINS,
    AcceptanceCounts,
    ContextCounts,
)
from draftquant.validate.counting.draft_counts import clustered as in_clusters
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.judging.policy import Policy
from draftquant.validate.report.document import parse_report
from draftquant.validate.report.html_report import page
from draftquant.validate.report.report_texts import junit, markdown
from handmade_replays import BASELINE, FIGURES, RELEASE, noisy, replay, spread
from handmade_reports import document, text_of

Rows = Sequence[tuple[float, ...]]
NOTHING = (0, 0)
EVERY = dataclasses.replace(RELEASE, name="custom", every_category_passes=True)

# ---- Categories


def test_a_policy_wants_two_prompts_at_least() -> None:
    for key in ("min_prompts", "min_category_prompts"):
        few, two = (dataclasses.replace(EVERY, **{key: count}) for count in (1, 2))
        assert (few.problem()[-10:], two.problem()) == ("at least 2", "")


def of_b(drop: int, noise: int, *, count: int = 30, policy: Policy = RELEASE) -> GateReport:
    """270 prompts of category 'a' that lose nothing, and some of 'b' that lose `drop`."""
    names = "a" * 270 + "b" * count
    candidate = noisy(0, 4, 270) + noisy(drop, noise, count)
    baseline = replay(spread(600, 270) + spread(600, count), categories=names)
    return judge(baseline, replay(candidate, categories=names), policy)


def test_a_category_has_a_limit_of_its_own() -> None:
    """-4 % in a tenth of the prompts: the whole lost 0.4 %, and would pass."""
    rows: list[tuple[int, int, dict[str, Any], str, str | None]] = [
        (64, 4, {}, "FAIL", "FAIL"),
        (64, 4, {"count": 29}, "INCONCLUSIVE", None), (64, 300, {"count": 29}, "PASS", None),
        (46, 4, {"count": 29}, "PASS", None),  # -2.9 %
        (64, 4, {"count": 5}, "INCONCLUSIVE", None),
        (64, 4, {"count": 4}, "PASS", None),  # too few even for that
        (55, 60, {}, "PASS", "INCONCLUSIVE"),
        (55, 60, {"policy": EVERY}, "INCONCLUSIVE", "INCONCLUSIVE"),
        (3, 4, {"policy": EVERY}, "PASS", "PASS"), (64, 4, {"policy": EVERY}, "FAIL", "FAIL"),
    ]  # fmt: skip
    for drop, noise, changes, verdict, of_part in rows:
        report = of_b(drop, noise, **changes)
        assert (report.verdict, report.categories[1].outcome) == (verdict, of_part)
        few = "1 category has fewer than 30 prompts, related ones counted once"
        unjudged = f"{few}, and is not judged alone: b"
        assert (unjudged in report.warnings) == (of_part is None)
        chance = "category 'b' lost more than its limit of 3%" in "".join(report.warnings)
        assert chance == (of_part == "INCONCLUSIVE")


def test_the_more_small_categories_the_surer_one_has_to_be() -> None:
    """-3.4 % +- 0.9 % in 12 prompts: beyond -3 % at 95 % alone, and not as one of ten."""
    for others, lost in ((0, ["b"]), (9, [])):
        names = "a" * 270 + "b" * 12 + "".join(chr(ord("c") + i) for i in range(others))
        rows = spread(600, len(names)), noisy(0, 4, 270) + noisy(55, 9, 12) + noisy(0, 4, others)
        report = judge(*(replay(each, categories=names) for each in rows), RELEASE)
        assert [one.category for one in report.categories if one.certainly_lost] == lost


def test_where_the_whole_fails_it_leads() -> None:
    """-4 %; a sole category is the whole, and no row."""
    rows = spread(600, 80), noisy(64, 4, 80)
    assert judge(*(replay(each, categories="ab") for each in rows), RELEASE).verdict == "FAIL"
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
    bins = (spread(600), long), (noisy(0, 4), lost)
    return judge(*(long_replay(*each, categories=categories) for each in bins), policy)


def test_a_bin_that_fails_makes_the_whole_fail() -> None:
    """-7 % in a tenth of the steps: the whole lost 0.7 %, and would pass."""
    report = judged(120)
    assert [one.outcome for one in report.context_bins] == ["PASS", "FAIL"]
    ((_, read),) = parse_report(text_of(report), "r.json").comparisons
    assert read.context_bins == report.context_bins
    edited = text_of(report).replace('"outcome": "FAIL"', '"outcome": "PASS"')
    with pytest.raises(Exception, match=r"context_bins\[1\].outcome: expected 'FAIL'"):
        parse_report(edited, "r.json")


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
    assert (lost.verdict, lost.context_bins[1].certainly_lost) == ("INCONCLUSIVE", True)
    assert judged(50, policy=EVERY).verdict == "INCONCLUSIVE"


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
        for drafts in (both, [both[0], long_replay(wholes[1], tenth(wholes[1], reach))]):
            report = judge(*drafts, RELEASE)
            assert sum("no context bin" in warning for warning in report.warnings) == 1
            for one in report.prompts:  # known for both drafts, or for none
                known = bool(one.baseline_context_bins), bool(one.candidate_context_bins)
                assert known == (one.id not in ("p0", "p1", "p2"),) * 2


def test_a_part_with_bounds_is_shown_though_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """As where clusters were declared: ten of 'b' have bounds, nine a warning alone."""
    for count in (10, 9):
        print_gate(of_b(3, 4, count=count))
        assert ("too few prompts" in capsys.readouterr().out) == (count == 10)


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


def test_a_cluster_is_called_by_its_first_prompt() -> None:
    """Copies need no cluster; texts show another one than was declared, or the same."""
    prompts = replay([(1, 9)] * 6, texts=[0, 0, 1, 2, 3, 4]).prompts
    hashes = [one.prompt_sha256 for one in prompts]
    found = in_clusters(prompts, [[0, 1], [2, 3], [5, 4]], [[2, 3], [4, 1]])
    assert [one.cluster for one in found] == ["", "", hashes[2], hashes[2], hashes[5], hashes[5]]
    assert [one.alike for one in found] == ["", "p4", hashes[2], hashes[2], "p4", ""]


def clustered(draft: DraftReplay, clusters: list[str], *, alike: bool = False) -> DraftReplay:
    """Which are declared, and shown by their texts where they are alike."""
    prompts = []
    for one, name in zip(draft.prompts, clusters, strict=True):
        prompts.append(dataclasses.replace(one, cluster=name, alike=name if alike else one.alike))
    return dataclasses.replace(draft, prompts=tuple(prompts))


def test_one_prompt_under_forty_names_is_one_prompt() -> None:
    """A draft that loses 4.8 %, on one prompt: without clusters both bounds are the change."""
    drafts = (replay(rows, texts=[7] * 40) for rows in ([(400, 600)] * 40, [(477, 523)] * 40))
    report = judge(*drafts, RELEASE)
    assert (report.verdict, report.change) == ("INCONCLUSIVE", None)
    assert (report.num_prompts, report.num_copies) == (1, 39)


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


def test_a_cluster_counts_as_one_prompt() -> None:
    """Four prompts in nine near copies each pass as 36, and are four."""
    baseline, candidate = replay(spread(600, 36)), replay(noisy(3, 4, 36))
    assert judge(baseline, candidate, RELEASE).verdict == "PASS"
    near = [clustered(each, [f"c{i % 4}" for i in range(36)]) for each in (baseline, candidate)]
    report = judge(*near, RELEASE)
    assert report.verdict == "INCONCLUSIVE"
    assert (report.num_prompts, report.num_clusters, report.num_copies) == (36, 4, 0)
    assert report.change is not None
    assert report.change.num_prompts == 4
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
        assert document(report).judgement == report
        by_texts = judge(*(clustered(each, pairs, alike=True) for each in drafts), RELEASE)
        assert by_texts.change is not None
        assert by_texts.change.relative_bounds == alone.change.relative_bounds


@pytest.mark.parametrize(("of_seen", "of_rest", "verdicts"), [
    (0, 0, ("PASS", "PASS", "PASS")),
    (160, 3, ("FAIL", "PASS", "FAIL")),
    (-70, 22, ("PASS", "FAIL", "FAIL")),
    (-30, 16, ("PASS", "INCONCLUSIVE", "INCONCLUSIVE")),
])  # fmt: skip
def test_seen_continuations_are_judged_both_ways(
    of_seen: int, of_rest: int, verdicts: tuple[str, str, str]
) -> None:
    """The worse verdict counts: neither prompts that gained nor leaving out losers helps."""
    noise, seen = 8, tuple(f"p{i}" for i in range(20))
    without = judge(replay(spread(600, 80)), replay(noisy(of_rest, noise, 80)), RELEASE)
    drafts = replay(spread(600, 100)), replay(noisy(of_seen, noise, 20) + noisy(of_rest, noise, 80))
    plain = judge(*drafts, RELEASE)
    report = judge(*drafts, RELEASE, background=Background(seen_continuations=seen))
    assert (plain.verdict, without.verdict, report.verdict) == verdicts
    assert (report.change, report.change_without_seen) == (plain.change, without.change)
    assert report.reason.startswith("Without the 20 prompts") == (plain.verdict != report.verdict)
    assert document(report).judgement == report


@pytest.mark.parametrize(("of_others", "noise", "count", "share", "is_told"), [
    (14, (4, 4), 40, 0.11, True),
    (-14, (4, 4), 40, 0.11, True),
    (14, (4, 4), 40, 0.1, False),  # a tenth is no loop
    (14, (60, 4), 40, 0.11, False),  # all are within the bounds of the others
    (14, (4, 120), 40, 0.11, False),  # the others are within those of all
    (14, (4, 4), 5, 0.11, True),
    (14, (4, 4), 4, 0.11, False),  # prompts too few to suspect anything
    (14, (4, 4), 1, 0.11, False),
])  # fmt: skip
def test_what_loops_hide_is_told_and_decides_nothing(
    of_others: int, noise: tuple[int, int], count: int, share: float, is_told: bool
) -> None:
    rows = noisy(of_others, noise[0], count) + noisy(0, noise[1], 60)
    baseline, candidate = (replay(each) for each in (spread(600, count) + spread(600, 60), rows))
    shares = [0.0] * count + [share] * 60
    both = zip(baseline.prompts, shares, strict=True)
    looping = [dataclasses.replace(one, repeated_8gram_share=own) for one, own in both]
    plain = judge(baseline, candidate, RELEASE)
    report = judge(dataclasses.replace(baseline, prompts=tuple(looping)), candidate, RELEASE)
    alone = judge(*(replay(each[:count]) for each in (spread(600, count), rows)), RELEASE)
    assert (report.verdict, report.reason) == (plain.verdict, plain.reason)
    assert report.change_without_loops == (alone.change if is_told else None)
    told = [one for one in report.warnings if f"60 of the {60 + count} continuations loop" in one]
    assert len(told) == is_told
    assert document(report).judgement == report
    for text in (markdown(document(report)), page(document(report))):
        assert ("continuations loop" in text) == is_told


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


def test_clusters_too_few_to_suspect_hide_no_lost_category() -> None:
    """Eight prompts of 408 lost 5 %; as four clusters they are fewer than are looked at."""
    names = [""] * 400 + [f"c{i // 2}" for i in range(8)]
    rows = spread(600, 408), noisy(0, 4, 400) + noisy(80, 8, 8)
    both = (replay(each, categories="a" * 400 + "b" * 8) for each in rows)
    assert judge(*(clustered(each, names) for each in both), RELEASE).categories[1].certainly_lost


def test_what_suggests_that_prompts_are_alike_is_said() -> None:
    made = replay(BASELINE, traces=dataclasses.replace(FIGURES, num_near_duplicates=7))
    named = (dataclasses.replace(p, id=f"doc{i // 5}-{i % 5}") for i, p in enumerate(made.prompts))
    made = dataclasses.replace(made, prompts=tuple(named))
    assert len(judge(made, made, RELEASE).warnings) > 2
    assert judge(replay(BASELINE), replay(noisy(3, 4)), RELEASE).warnings == ()


def test_a_change_without_spread_is_no_measurement() -> None:
    """The same counts lost in each of forty; other steps of as many tokens are no change."""
    report = judge(replay([(400, 600)] * 40), replay([(405, 595)] * 40), RELEASE)
    assert report.verdict == "ANOMALOUS"
    one_differs: list[tuple[int, ...]] = [(405, 595)] * 39 + [(404, 596)]
    assert judge(replay([(400, 600)] * 40), replay(one_differs), RELEASE).verdict == "PASS"
    drafts = replay([(20, 30, 40, 50)] * 40), replay([(21, 28, 41, 50)] * 40)
    assert judge(*drafts, RELEASE).verdict == "PASS"


def test_few_long_prompts_are_few_prompts() -> None:
    """30 of 1000 steps and 10 of 20000: (230e3)^2 / (30e6 + 4e9) = 13.1 of 40."""
    long = [1] * 30 + [20] * 10
    drafts = [replay([(a * n, b * n) for (a, b), n in zip(rows, long, strict=True)])
              for rows in (spread(600), noisy(3, 4))]  # fmt: skip
    report = judge(*drafts, RELEASE)
    assert report.change is not None
    assert report.change.effective_num_prompts == pytest.approx(230e3**2 / 4.03e9)
    assert judge(*drafts, dataclasses.replace(RELEASE, min_prompts=13)).verdict == "PASS"
    many = [replay([(a * n, b * n) for (a, b), n in zip(rows, 3 * long, strict=True)])
            for rows in (spread(600, 120), noisy(3, 4, 120))]  # fmt: skip
    assert "(effective sample size 39.4) do not exclude" in judge(*many, RELEASE).reason


def test_a_k_that_leaves_hardly_any_step_is_refused() -> None:
    """399 steps in 40 prompts, one of them too short for any."""
    few = [(0, 0), (4, 5), *[(4, 6)] * 37, (8, 12)]
    with pytest.raises(GateError, match=r"K = 1 leaves 9\.97 verify steps .* at least 10"):
        judge(replay(few), replay(few), RELEASE)
    enough = [(0, 0), (4, 6), *[(4, 6)] * 37, (8, 12)]
    assert judge(replay(enough), replay(enough), RELEASE).num_short_prompts == 1
