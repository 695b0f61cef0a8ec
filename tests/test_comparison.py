"""Several drafts: intervals that hold together, traffic, and what cannot be compared."""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant.recipes.errors import CompareError, GateError
from draftquant.validate.comparison import scopes as simultaneous_module
from draftquant.validate.comparison.draft_comparison import compare, drawing, page
from draftquant.validate.comparison.scopes import (
    ALL_PROMPTS,
    MOST_CORRELATED,
    TRAFFIC,
    Contestant,
    Counted,
    CountedDrafts,
    Estimate,
    bonferroni,
    count_drafts,
    level_of_each,
    samples_of,
    simultaneous,
)
from draftquant.validate.comparison.sources import ReplayedDraft, of_files, of_replays
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.draft_counts import DraftReplay
from draftquant.validate.counting.paired_change import paired_change
from draftquant.validate.judging.judgement import judge
from draftquant.validate.measure.measurement import Measurement
from draftquant.validate.measure.measurement_file import line_of
from handmade_measurements import alternating, measurement
from handmade_replays import FIGURES, RELEASE, noisy, replay, spread
from handmade_reports import HASHES, joint, served, text_of
from scipy import stats

K = 3
Floats = np.ndarray


def drafts(
    lengths: Sequence[Sequence[float]], steps: Sequence[float], categories: str
) -> CountedDrafts:
    """Prompts of these acceptance lengths and steps under each draft."""
    rounds = np.array([steps] * len(lengths), dtype=float)
    return CountedDrafts(
        names=tuple("ABCDEFGH"[: len(lengths)]),
        sha256=(None,) * len(lengths),
        categories=tuple(categories),
        tokens=np.array(lengths) * rounds,
        steps=rounds,
    )


def compared(counted: CountedDrafts, **options: object) -> object:
    return compare(Counted(drafts=counted, num_draft_tokens=K, counted_by="by hand"), **options)  # type: ignore[arg-type]


# ---- intervals


def simulated(generator: np.random.Generator, count: int, shifts: Sequence[float]) -> Floats:
    """[D, N, 2] tokens and steps: prompts have their own acceptance, and each draft's own noise."""
    steps = generator.poisson(43, count) + 1.0
    own = generator.normal(2.9, 0.28, count)
    rows = []
    for shift in shifts:
        noise = generator.normal(0, 0.1, count)
        rows.append(np.stack([(own * (1 + shift) + noise) * steps, steps], axis=1))
    return np.stack(rows)


def test_all_intervals_hold_together_as_often_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """250 simulated runs of three drafts on four categories; the truth is no change at all.

    Separate 95 % intervals miss somewhere in a third of the runs. The standard error of a coverage
    of 0.95 is 0.014 here.
    """
    monkeypatch.setattr(simultaneous_module, "NUM_DRAWS", 4_000)
    generator = np.random.default_rng(1)
    runs, together, apart, widths = 250, 0, 0, []
    for _ in range(runs):
        found = simulated(generator, 80, (0.0, 0.0, 0.0))
        counted = CountedDrafts(
            names=("A", "B", "C"),
            sha256=(None,) * 3,
            categories=tuple("abcd" * 20),
            tokens=found[:, :, 0],
            steps=found[:, :, 1],
        )
        report = compare(Counted(drafts=counted, num_draft_tokens=K, counted_by="simulated"))
        changes = [change for scope in report.scopes for change in scope.changes]
        assert len(changes) == 5 * 3
        together += all(change.lower <= 0 <= change.upper for change in changes)
        separate = (1 + 0.95) / 2, (1 + report.confidence_of_each) / 2
        shrink = stats.norm.ppf(separate[0]) / stats.norm.ppf(separate[1])
        apart += all(
            abs(math.log1p(change.relative_change))
            <= shrink * (math.log1p(change.upper) - math.log1p(change.lower)) / 2
            for change in changes
        )
        widths.append((report.confidence_of_each, report.bonferroni_of_each))
    assert 0.92 <= together / runs <= 0.98
    assert apart / runs < 0.75
    assert all(0.95 < each < of_bonferroni for each, of_bonferroni in widths)


def test_one_interval_needs_no_correction() -> None:
    generator = np.random.default_rng(0)
    one = Estimate(value=0.1, contributions=generator.normal(size=50), degrees=30.0)
    assert level_of_each([one], 0.95) == pytest.approx(0.95, abs=0.003)
    found = simultaneous([one], 0.95)
    reach = stats.t.ppf((1 + found.each) / 2, 30.0) * one.standard_error
    assert found.bounds == ((pytest.approx(0.1 - reach), pytest.approx(0.1 + reach)),)


def test_independent_ones_need_what_sidak_says_and_equal_ones_nothing() -> None:
    apart = [Estimate(value=0.0, contributions=row, degrees=9.0) for row in np.eye(10)]
    assert level_of_each(apart, 0.95) == pytest.approx(0.95**0.1, abs=0.001)
    alike = [apart[0]] * 10
    assert level_of_each(alike, 0.95) == pytest.approx(0.95, abs=0.003)
    assert bonferroni(10, 0.95) == pytest.approx(0.995)


def test_without_spread_there_is_no_width() -> None:
    still = Estimate(value=0.0, contributions=np.zeros(5), degrees=4.0)
    assert simultaneous([still], 0.95).bounds == ((0.0, 0.0),)


def test_beyond_a_number_of_estimates_bonferroni_decides() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(MOST_CORRELATED + 1, 30))
    many = [Estimate(value=0.0, contributions=row, degrees=20.0) for row in rows]
    drawn, found = simultaneous(many[:-1], 0.95), simultaneous(many, 0.95)
    assert (drawn.method[:5], found.method[:5]) == ("max-t", "Bonfe")
    assert found.each == bonferroni(MOST_CORRELATED + 1, 0.95) > drawn.each
    assert found.bounds[0][1] > drawn.bounds[0][1]
    still = Estimate(value=0.0, contributions=np.zeros(30), degrees=20.0)
    assert simultaneous([*many[:-1], still], 0.95).each == drawn.each  # it needs no correction


def wide(number: int, categories: int, prompts: int) -> CountedDrafts:
    """So many drafts on so many prompts."""
    generator = np.random.default_rng(0)
    steps = np.full((number, prompts), 40.0)
    return CountedDrafts(
        names=tuple(f"draft {each}" for each in range(number)),
        sha256=(None,) * number,
        categories=tuple(f"category {each % categories}" for each in range(prompts)),
        tokens=steps * generator.uniform(2, 3, (number, prompts)),
        steps=steps,
    )


def test_many_drafts_in_many_categories_take_seconds() -> None:
    began = time.process_time()
    report = compared(wide(30, 20, 400))
    assert time.process_time() - began < 15  # max-t took 20 minutes and 4 GB
    changes = [change for scope in report.scopes for change in scope.changes]  # type: ignore[attr-defined]
    assert len(changes) == 21 * 435
    assert report.confidence_of_each == report.bonferroni_of_each  # type: ignore[attr-defined]
    assert report.method.startswith("Bonferroni over all pairs")  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(2, 3000, 30_000), (600, 40, 400), (2, 30_000, 30_000)])
def test_more_than_there_is_room_for_is_refused_before_it_is_reckoned(
    shape: tuple[int, int, int],
) -> None:
    counted = wide(*shape)
    began = time.process_time()
    with pytest.raises(CompareError, match=r"expected at most 8,388,608 contributions") as caught:
        compared(counted)
    assert time.process_time() - began < 2
    assert "fewer drafts at a time" in caught.value.fix


def test_a_page_of_many_drafts_has_a_row_for_each() -> None:
    many: Any = compared(wide(20, 2, 40))
    text = page(many)
    assert text.count('<th scope="row">draft 7</th>') == 3 + 1  # scopes, and the list of hashes
    assert "Which draft: 20 drafts" in text
    assert drawing(many).count("draft 7<") == 1


def test_two_drafts_are_compared_as_the_gate_does() -> None:
    """The same estimate and standard error; the bounds are two-sided at the same degrees.

    Those of the gate look at skewness too.
    """
    generator = np.random.default_rng(3)
    histograms = [
        [tuple(int(x) for x in generator.multinomial(n, p)) for n in range(20, 60)]
        for p in ((0.3, 0.2, 0.2, 0.3), (0.35, 0.2, 0.2, 0.25))
    ]
    counts = [[AcceptanceCounts(histogram=h) for h in each] for each in histograms]
    gate = paired_change(counts[0], counts[1], confidence=0.975)
    counted = count_drafts(
        [
            Contestant(name=name, sha256=None, prompts=replay(each).prompts)
            for name, each in zip("AB", histograms, strict=True)
        ]
    )
    report = compare(Counted(drafts=counted, num_draft_tokens=K, counted_by=""))
    (change,) = report.whole.changes
    assert math.log1p(change.relative_change) == pytest.approx(gate.log_ratio)
    level = (1 + report.confidence_of_each) / 2
    quantile = stats.t.ppf(level, gate.effective_num_prompts - 1)
    reach = (math.log1p(change.upper) - gate.log_ratio) / quantile
    assert reach == pytest.approx(gate.standard_error)


# ---- traffic


def test_strata_are_taken_off_the_degrees_of_freedom() -> None:
    """Ten prompts of equal length in each of two categories: 20 less 1, and less 2."""
    counted = drafts([[2] * 20, [3] * 20], [10] * 20, "a" * 10 + "b" * 10)
    plain, *_ = samples_of(counted, {})
    mixed, *_ = samples_of(counted, {"a": 0.5, "b": 0.5})
    assert plain.change(0, 1).degrees == pytest.approx(19)
    assert mixed.change(0, 1).degrees == pytest.approx(18)


def test_prompts_of_a_cluster_are_one() -> None:
    """Whether replays or a file of them say it."""
    histograms = [(5, 5), (4, 6), (3, 7), (2, 8)]
    prompts = replay(histograms).prompts
    clustered = [
        dataclasses.replace(one, cluster="x" if i < 2 else "") for i, one in enumerate(prompts)
    ]
    counted = count_drafts([Contestant(name=name, sha256=None, prompts=clustered) for name in "AB"])
    assert counted.steps.tolist() == [[20, 10, 10]] * 2
    assert counted.tokens.tolist() == [[31, 17, 18]] * 2


def test_traffic_weighs_output_tokens_by_hand() -> None:
    """a has length 2, b 4: with 3/4 of the tokens in a, steps per token are 3/4 / 2 + 1/4 / 4."""
    counted = drafts([[2, 2, 4, 4], [3, 3, 3, 3]], [10, 20, 30, 40], "aabb")
    report = compare(
        Counted(drafts=counted, num_draft_tokens=K, counted_by=""), traffic={"a": 0.75, "b": 0.25}
    )
    assert report.whole.name == TRAFFIC
    assert report.whole.num_prompts == 4
    assert report.whole.lengths == pytest.approx((1 / (0.75 / 2 + 0.25 / 4), 3))
    plain = compare(Counted(drafts=counted, num_draft_tokens=K, counted_by=""))
    assert plain.whole.name == ALL_PROMPTS
    assert plain.whole.lengths == pytest.approx(((60 + 280) / 100, 3))


def test_traffic_of_the_recorded_shares_is_the_whole() -> None:
    generator = np.random.default_rng(5)
    found = simulated(generator, 40, (0.0, 0.01))
    counted = CountedDrafts(
        names=("A", "B"), sha256=(None, None), categories=("a", "b") * 20,
        tokens=found[:, :, 0], steps=found[:, :, 1],
    )  # fmt: skip
    shares = [float(counted.tokens[0, i::2].sum() / counted.tokens[0].sum()) for i in range(2)]
    traffic = dict(zip("ab", shares, strict=True))
    mixed = compare(Counted(drafts=counted, num_draft_tokens=K, counted_by=""), traffic=traffic)
    plain = compare(Counted(drafts=counted, num_draft_tokens=K, counted_by=""))
    assert mixed.whole.lengths[0] == pytest.approx(plain.whole.lengths[0])
    assert mixed.whole.changes[0].lower == pytest.approx(plain.whole.changes[0].lower, rel=0.2)


def test_the_answer_depends_on_the_traffic() -> None:
    """B is better at code and worse at chat, each by far more than prompts differ."""
    generator = np.random.default_rng(7)
    base = 2.9 + 0.05 * generator.normal(size=40)
    tilt = np.array([0.2, -0.2] * 20) + 0.1 * generator.normal(size=40)
    counted = drafts([base, base + tilt], [50] * 40, "bc" * 20)

    def best(code: float) -> tuple[str | None, str]:
        traffic = {"b": code, "c": 1 - code}
        report = compare(
            Counted(drafts=counted, num_draft_tokens=K, counted_by=""), traffic=traffic
        )
        return report.whole.best, report.answer

    assert best(0.9) == (
        "B",
        "For your traffic, B has the longest acceptance length, clearly longer than every other"
        " draft.",
    )  # fmt: skip
    assert best(0.1)[0] == "A"
    assert "but its difference from B may be chance" in best(0.5)[1]


def test_it_says_when_nothing_is_separable() -> None:
    generator = np.random.default_rng(2)
    found = simulated(generator, 30, (0.0, 0.0, 0.0))
    counted = drafts(found[:, :, 0] / found[:, :, 1], found[0, :, 1], "a" * 30)
    report = compare(Counted(drafts=counted, num_draft_tokens=K, counted_by=""))
    assert report.answer == (
        "These prompts show no clear difference between any two drafts. That is not a PASS: judge"
        " the draft that you want with 'draftquant gate' before you ship it, or record more"
        " prompts."
    )
    assert len(report.scopes) == 1  # one category is the whole


def test_small_categories_are_shown_and_not_compared() -> None:
    generator = np.random.default_rng(2)
    found = simulated(generator, 31, (0.0, 0.1))
    counted = drafts(found[:, :, 0] / found[:, :, 1], found[0, :, 1], "a" * 22 + "b" * 9)
    report = compare(Counted(drafts=counted, num_draft_tokens=K, counted_by=""))
    assert [(scope.name, len(scope.changes)) for scope in report.scopes] == [
        (ALL_PROMPTS, 1), ("a", 1), ("b", 0),
    ]  # fmt: skip
    assert report.scopes[2].best is None
    assert report.warnings == ("categories with fewer than 10 prompts were not compared: b (9)",)
    assert report.scopes[2].against_first(report.names) == (None,)


@pytest.mark.parametrize(
    ("traffic", "what"),
    [
        ({"x": 1.0}, r"'x' has 0 distinct prompts, expected two or more\n.*categories.*: a, b"),
        ({"a": 0.5}, "shares that add up to 1, got 0.5"),
        ({"a": 1.2, "b": -0.2}, r"'a': expected a share in \(0, 1\], got 1.2"),
    ],
)
def test_traffic_that_does_not_fit(traffic: dict[str, float], what: str) -> None:
    counted = drafts([[2, 2, 4, 4], [3, 3, 3, 3]], [10] * 4, "aabb")
    with pytest.raises(CompareError, match=what):
        compare(Counted(drafts=counted, num_draft_tokens=K, counted_by=""), traffic=traffic)


def test_a_confidence_that_is_none() -> None:
    with pytest.raises(CompareError, match=r"--confidence: expected a share in \(0.5, 1\)"):
        compared(drafts([[2, 2], [3, 3]], [10, 10], "aa"), confidence=1.0)


# ---- who is compared


def contestant(name: str, sha256: str | None = None, **changes: object) -> Contestant:
    return Contestant(name=name, sha256=sha256, prompts=replay(spread(600), **changes).prompts)  # type: ignore[arg-type]


def test_copies_of_a_prompt_are_summed() -> None:
    texts = [0, 0, *range(1, 39)]
    counted = count_drafts([contestant("A", texts=texts), contestant("B", texts=texts)])
    assert counted.steps.shape == (2, 39)
    assert counted.steps[0, 0] == 2000


def test_drafts_of_one_name_are_told_apart() -> None:
    pair = [contestant("x", "1" * 64), contestant("x", "2" * 64), contestant("y")]
    assert count_drafts(pair).names == ("x (111111111111)", "x (222222222222)", "y")
    unknown = [contestant("x"), contestant("x")]
    assert count_drafts(unknown).names == ("x (number 1)", "x (number 2)")


def test_drafts_that_cannot_be_compared() -> None:
    with pytest.raises(CompareError, match="expected two drafts or more, got 1"):
        count_drafts([contestant("A")])
    with pytest.raises(CompareError, match="B: is the same draft as A"):
        count_drafts([contestant("A", "1" * 64), contestant("B", "1" * 64)])
    with pytest.raises(CompareError, match="B: was counted on other prompts than A"):
        count_drafts([contestant("A"), contestant("B", texts=range(100, 140))])
    with pytest.raises(CompareError, match="expected two distinct prompts or more"):
        count_drafts([contestant("A", texts=[1] * 40), contestant("B", texts=[1] * 40)])


def test_replays_are_compared_by_their_hashes() -> None:
    counted = of_replays([replay(spread(600)), replay(noisy(3, 4))], ["1" * 64, "2" * 64])
    assert counted.drafts.sha256 == ("1" * 64, "2" * 64)
    assert counted.counted_by.startswith("greedy speculative decoding")
    assert counted.warnings == ()


# ---- files


def report_file(path: Path, drop: int, *, sha256: str, **changes: object) -> Path:
    background = dataclasses.replace(HASHES, candidate_sha256=sha256)
    both = [replay(spread(600), **changes), replay(noisy(drop, 4), **changes)]  # type: ignore[arg-type]
    path.write_text(text_of(judge(*both, RELEASE, background=background)), encoding="utf-8")
    return path


def counted_files(*paths: Path) -> Counted:
    return of_files(paths)


def test_reports_of_one_baseline_are_compared(tmp_path: Path) -> None:
    one = report_file(tmp_path / "a.json", 3, sha256="2" * 64)
    other = report_file(tmp_path / "b.json", 9, sha256="3" * 64)
    counted = counted_files(one, other)
    assert counted.drafts.names == ("bf16", "int4 (222222222222)", "int4 (333333333333)")
    assert counted.num_draft_tokens == 1
    report = compare(counted)
    assert report.whole.changes[0].relative_change == pytest.approx(-0.003 / 1.602)
    one.write_text(
        one.read_text(encoding="utf-8").replace("\n", ""), encoding="utf-8"
    )  # on one line it is a report still
    assert counted_files(one, other).drafts.names == counted.drafts.names


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"traces": dataclasses.replace(FIGURES, sha256="9" * 64)}, "has other traces than"),
        ({"draft_sampling": "probabilistic"}, "has another --draft-sampling than"),
    ],
)
def test_reports_that_cannot_be_compared(
    changes: dict[str, object], what: str, tmp_path: Path
) -> None:
    one = report_file(tmp_path / "a.json", 3, sha256="2" * 64)
    other = report_file(tmp_path / "b.json", 9, sha256="3" * 64, **changes)
    with pytest.raises(CompareError, match=what):
        counted_files(one, other)


def test_reports_of_other_baselines_cannot_be_compared(tmp_path: Path) -> None:
    one = report_file(tmp_path / "a.json", 3, sha256="2" * 64)
    background = dataclasses.replace(HASHES, baseline_sha256="8" * 64)
    other = judge(replay(spread(600)), replay(noisy(3, 4)), RELEASE, background=background)
    (tmp_path / "b.json").write_text(text_of(other), encoding="utf-8")
    with pytest.raises(CompareError, match="has another baseline than"):
        counted_files(one, tmp_path / "b.json")
    moved = judge(replay(spread(590)), replay(noisy(3, 4)), RELEASE, background=HASHES)
    (tmp_path / "c.json").write_text(text_of(moved), encoding="utf-8")
    with pytest.raises(CompareError, match="has other counts of the same baseline than"):
        counted_files(one, tmp_path / "c.json")


def test_a_report_of_servers_gives_way_to_the_measurements(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text_of(served()), encoding="utf-8")
    with pytest.raises(CompareError, match="fix: give the measurements themselves"):
        counted_files(tmp_path / "a.json")


def test_the_replays_of_a_joint_report_are_taken(tmp_path: Path) -> None:
    (tmp_path / "joint.json").write_text(text_of(joint()), encoding="utf-8")
    assert len(counted_files(tmp_path / "joint.json").drafts.names) == 2


def test_a_report_that_compares_nothing(tmp_path: Path) -> None:
    other = replay(spread(600), traces=dataclasses.replace(FIGURES, sha256="1" * 64))
    (tmp_path / "a.json").write_text(
        text_of(judge(replay(spread(600)), other, RELEASE)), encoding="utf-8"
    )
    with pytest.raises(CompareError, match="compares no prompts: it is ANOMALOUS"):
        counted_files(tmp_path / "a.json")


def write_measurement(path: Path, drop: int, **changes: object) -> Path:
    rounds = [alternating(200, 80 + i % 5 + drop) for i in range(40)]
    one: Measurement = measurement(rounds, **changes)  # type: ignore[arg-type]
    path.write_text(line_of(one.setup) + "".join(map(line_of, one.records)), encoding="utf-8")
    return path


def test_measurements_are_compared_by_whole_outputs(tmp_path: Path) -> None:
    runs = [write_measurement(tmp_path / f"{name}.jsonl", drop) for name, drop in
            (("a", 0), ("b", 1), ("c", 30))]  # fmt: skip
    counted = counted_files(*runs)
    assert counted.drafts.names == ("a.jsonl", "b.jsonl", "c.jsonl")
    assert counted.counted_by == "all verify steps of whole outputs of vllm 0.32.0"
    report = compare(counted)
    assert report.whole.best == "a.jsonl"
    assert "c.jsonl" not in report.whole.alike


def test_measurements_that_cannot_be_compared(tmp_path: Path) -> None:
    one = write_measurement(tmp_path / "a.jsonl", 0)
    hot = write_measurement(tmp_path / "b.jsonl", 0, temperature=1.0)
    with pytest.raises(CompareError, match=r"temperature: 0, 1\.0"):
        counted_files(one, hot)
    with pytest.raises(GateError, match="is the same measurement"):
        counted_files(one, one)
    silent = write_measurement(tmp_path / "d.jsonl", 0)
    *setup, last = silent.read_text(encoding="utf-8").splitlines()
    found = json.loads(last)
    found["accepted"] = [step for step in found["accepted"] if step]
    found["histogram"][0] = 0
    silent.write_text("\n".join([*setup, json.dumps(found), ""]), encoding="utf-8")
    with pytest.raises(CompareError, match=r"d\.jsonl are no verify steps"):
        counted_files(one, silent)
    report = report_file(tmp_path / "c.json", 3, sha256="2" * 64)
    with pytest.raises(CompareError, match=r"is a report, and .*a\.jsonl is a measurement"):
        counted_files(one, report)


def test_what_is_neither(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("no JSON", encoding="utf-8")
    with pytest.raises(GateError, match="is no report of the gate"):
        counted_files(tmp_path / "x.json")
    with pytest.raises(
        CompareError, match="fix: add --traces T to compare drafts; without it, give"
    ):
        counted_files(tmp_path / "none")


def replay_file(path: Path, *replays: DraftReplay, **changes: object) -> Path:
    """As `replay --json` prints it."""
    found = [ReplayedDraft.of(one, rope_theta=None, dtype="float32") for one in replays]
    path.write_text(
        json.dumps([one.to_mapping() | changes for one in found], indent=2), encoding="utf-8"
    )
    return path


def test_printed_replays_are_compared(tmp_path: Path) -> None:
    bf16 = replay(spread(600), name="bf16")
    one = replay_file(tmp_path / "a.json", bf16, replay(noisy(3, 4), name="int4"))
    other = replay_file(tmp_path / "b.json", bf16, replay(noisy(9, 4), name="fp4"))
    counted = counted_files(one, other)
    assert counted.drafts.names == ("bf16", "int4", "fp4")
    assert counted.drafts.sha256 == (None, None, None)
    of_replay = of_replays([bf16, replay(noisy(3, 4))], ["1" * 64, "2" * 64])
    assert counted.counted_by == of_replay.counted_by
    assert counted.drafts.tokens[1] == pytest.approx(of_replay.drafts.tokens[1])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dtype": "bfloat16"}, "has another --draft-sampling or --dtype than"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: expected 1 to 1000, got 0"),
        ({"num_draft_tokens": 2}, "'p0': expected 3 counts of verify steps"),
        ({"color": 1}, "color: unknown key"),
    ],
)
def test_replays_that_cannot_be_compared(
    changes: dict[str, object], what: str, tmp_path: Path
) -> None:
    one = replay_file(tmp_path / "a.json", replay(spread(600)))
    other = replay_file(tmp_path / "b.json", replay(noisy(3, 4)), **changes)
    with pytest.raises(CompareError, match=what):
        counted_files(one, other)


def test_replays_of_other_traces_or_depth_cannot_be_compared(tmp_path: Path) -> None:
    one = replay_file(tmp_path / "a.json", replay(spread(600)))
    moved = replay(noisy(3, 4), traces=dataclasses.replace(FIGURES, sha256="9" * 64))
    deep = replay([(1, 2, 3)] * 40)
    for made, what in ((moved, "has other traces"), (deep, r"has another K \(2, not 1\)")):
        with pytest.raises(CompareError, match=what):
            counted_files(one, replay_file(tmp_path / "b.json", made))


def test_a_list_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(CompareError, match="is no list of replays"):
        counted_files(tmp_path / "a.json")
