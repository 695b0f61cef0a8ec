"""Several drafts: intervals that hold together, traffic, and what cannot be compared."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant.recipes.errors import CompareError, DraftQuantError
from draftquant.validate.comparison import draft_comparison, scopes
from draftquant.validate.comparison import scopes as simultaneous_module
from draftquant.validate.comparison.sources import ReplayedDraft, of_files, of_replays
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.draft_counts import DraftReplay
from draftquant.validate.counting.paired_change import paired_change
from draftquant.validate.judging.judgement import judge
from handmade_measurements import losing, written
from handmade_replays import FIGURES, RELEASE, noisy, replay, spread
from handmade_reports import HASHES, joint, served, text_of
from scipy import stats


def drafts(lengths: Any, steps: Any, categories: Sequence[str]) -> scopes.CountedDrafts:
    """[D, N] acceptance lengths and [N] steps of prompts of these categories."""
    rounds = np.array([steps] * len(lengths), dtype=float)
    return scopes.CountedDrafts(
        names=tuple(f"draft {i}" for i in range(len(lengths))),
        sha256=(None,) * len(lengths),
        categories=tuple(categories),
        tokens=np.array(lengths) * rounds,
        steps=rounds,
    )


USUAL: dict[str, Any] = {"traffic": None, "confidence": 0.95, "date": "2026-11-30", "argv": ()}


def compared(counted: scopes.CountedDrafts, **options: Any) -> draft_comparison.ComparisonReport:
    by_hand = scopes.Counted(drafts=counted, num_draft_tokens=3, counted_by="by hand")
    return draft_comparison.compare(by_hand, **USUAL | options)


# ---- intervals


def simulated(
    generator: np.random.Generator, categories: str, shifts: Sequence[float]
) -> scopes.CountedDrafts:
    """Prompts have their own acceptance, and each draft's own noise."""
    count = len(categories)
    steps, own = generator.poisson(43, count) + 1.0, generator.normal(2.9, 0.28, count)
    lengths = [own * (1 + shift) + generator.normal(0, 0.1, count) for shift in shifts]
    return drafts(lengths, steps, categories)


def test_all_intervals_hold_together_as_often_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 runs without any change; separate 95 % intervals miss somewhere in a third of them."""
    monkeypatch.setattr(simultaneous_module, "NUM_DRAWS", 4_000)
    generator = np.random.default_rng(1)
    together = 0
    for _ in range(100):
        report = compared(simulated(generator, "abcd" * 20, (0.0, 0.0, 0.0)))
        changes = [change for scope in report.scopes for change in scope.changes]
        assert len(changes) == 5 * 3
        together += all(change.lower <= 0 <= change.upper for change in changes)
        assert 0.95 < report.confidence_of_each < report.bonferroni_of_each
    assert 90 <= together <= 99


def wide(number: int, categories: int, prompts: int) -> scopes.CountedDrafts:
    """So many drafts on so many prompts."""
    lengths = np.random.default_rng(0).uniform(2, 3, (number, prompts))
    return drafts(lengths, [40.0] * prompts, [f"{i % categories}" for i in range(prompts)])


def test_too_many_drafts_are_refused_before_they_are_reckoned() -> None:
    report = compared(wide(15, 20, 400))
    assert sum(len(scope.changes) for scope in report.scopes) == 21 * 105
    assert report.confidence_of_each == report.bonferroni_of_each
    for shape in ((2, 3000, 30_000), (600, 40, 400)):
        with pytest.raises(CompareError):
            compared(wide(*shape))


def test_two_drafts_are_compared_as_the_gate_does() -> None:
    """The same estimate and standard error; its bounds look at skewness too."""
    generator = np.random.default_rng(3)
    histograms = [
        [tuple(int(x) for x in generator.multinomial(n, p)) for n in range(20, 60)]
        for p in ((0.3, 0.2, 0.2, 0.3), (0.35, 0.2, 0.2, 0.25))
    ]
    counts = [[AcceptanceCounts(histogram=h) for h in each] for each in histograms]
    gate = paired_change(*counts, confidence=0.975)
    contestants = [scopes.Contestant(name=name, sha256=None, prompts=replay(each).prompts)
                   for name, each in zip("AB", histograms, strict=True)]  # fmt: skip
    report = compared(scopes.count_drafts(contestants))
    (change,) = report.whole.changes
    assert math.log1p(change.relative_change) == pytest.approx(gate.log_ratio)
    quantile = stats.t.ppf((1 + report.confidence_of_each) / 2, gate.effective_num_prompts - 1)
    reach = (math.log1p(change.upper) - gate.log_ratio) / quantile
    assert reach == pytest.approx(gate.standard_error)


# ---- traffic


def test_strata_are_taken_off_the_degrees_of_freedom() -> None:
    """Prompts that vary alike in two categories and one outside: all less 1, and less 2."""
    for each in (2, 10):
        lengths = [[2, 2.5] * each + [2] * each, [3, 3.5] * each + [3] * each]
        counted = drafts(lengths, [10] * 3 * each, "a" * each + "b" * each + "c" * each)
        plain, *_ = scopes.samples_of(counted, {})
        mixed, *_ = scopes.samples_of(counted, {"a": 0.5, "b": 0.5})
        assert plain.change(0, 1).degrees == pytest.approx(3 * each - 1)
        assert mixed.change(0, 1).degrees == pytest.approx(2 * each - 2)
        assert mixed.change(0, 1).contributions[: 2 * each].all()


def test_the_answer_depends_on_the_traffic() -> None:
    """Draft 1 is better at b and worse at c, each by far more than prompts differ."""
    generator = np.random.default_rng(7)
    base = 2.9 + 0.05 * generator.normal(size=40)
    tilt = np.array([0.2, -0.2] * 20) + 0.1 * generator.normal(size=40)
    counted = drafts([base, base + tilt], [50] * 40, "bc" * 20)
    for share, best, said in (
        (0.9, "draft 1", "draft 1 has the longest acceptance length, clearly longer than every"),
        (0.1, "draft 0", "clearly longer"),
        (0.5, "draft 0", "but its difference from draft 1 may be chance"),
    ):
        report = compared(counted, traffic={"b": share, "c": 1 - share})
        assert (report.whole.best, said in report.answer) == (best, True)
    nothing = compared(simulated(np.random.default_rng(2), "a" * 30, (0.0, 0.0, 0.0)))
    assert nothing.answer.startswith("These prompts show no clear difference between any two")
    assert len(nothing.scopes) == 1  # one category is the whole


def test_options_that_do_not_fit() -> None:
    counted = drafts([[2, 2, 4, 4], [3, 3, 3, 3]], [10] * 4, "aabb")
    for traffic in ({"x": 1.0}, {"a": 0.5}, {"a": 1.2, "b": -0.2}):
        with pytest.raises(CompareError):
            compared(counted, traffic=traffic)
    with pytest.raises(CompareError):
        compared(counted, confidence=1.0)


# ---- who is compared


def contestant(name: str, sha256: str | None = None, **changes: Any) -> scopes.Contestant:
    return scopes.Contestant(
        name=name, sha256=sha256, prompts=replay(spread(600), **changes).prompts
    )


def test_copies_of_a_prompt_and_those_of_a_cluster_are_summed() -> None:
    texts = [0, 0, *range(1, 39)]
    counted = scopes.count_drafts([contestant("A", texts=texts), contestant("B", texts=texts)])
    assert (counted.steps.shape, counted.steps[0, 0]) == ((2, 39), 2000)
    made = replay([(5, 5), (4, 6), (3, 7), (2, 8)]).prompts
    prompts = [dataclasses.replace(one, cluster="x" * (i < 2)) for i, one in enumerate(made)]
    counted = scopes.count_drafts(
        [scopes.Contestant(name=name, sha256=None, prompts=prompts) for name in "AB"]
    )
    assert counted.steps.tolist() == [[20, 10, 10]] * 2
    assert counted.tokens.tolist() == [[31, 17, 18]] * 2
    pair = [contestant("x", "1" * 64), contestant("x", "2" * 64), contestant("y")]
    assert scopes.count_drafts(pair).names == ("x (111111111111)", "x (222222222222)", "y")
    assert scopes.count_drafts([contestant("x")] * 2).names == ("x (number 1)", "x (number 2)")


def test_drafts_that_cannot_be_compared() -> None:
    for who in (
        [contestant("A")],
        [contestant("A", "1" * 64), contestant("B", "1" * 64)],
        [contestant("A"), contestant("B", texts=range(100, 140))],
        [contestant("A", texts=[1] * 40), contestant("B", texts=[1] * 40)],
    ):
        with pytest.raises(CompareError):
            scopes.count_drafts(who)


# ---- files


def report_file(path: Path, drop: int, *, base: int = 600, **changes: Any) -> Path:
    """A report of the gate; `changes` of its replays, or hashes of its background."""
    hashes = {key: changes.pop(key) for key in list(changes) if key.endswith("sha256")}
    both = [replay(spread(base), **changes), replay(noisy(drop, 4), **changes)]
    background = dataclasses.replace(HASHES, **hashes)
    path.write_text(text_of(judge(*both, RELEASE, background=background)), encoding="utf-8")
    return path


def measurement_file(path: Path, drop: int, **changes: Any) -> Path:
    return written(path, losing(drop, **({"name": "run"} | changes)))


def replay_file(path: Path, *replays: DraftReplay, **changes: Any) -> Path:
    """As `replay --json` prints it."""
    found = [ReplayedDraft.of(one, rope_theta=None, dtype="float32") for one in replays]
    documents = [one.to_mapping() | changes for one in found]
    path.write_text(json.dumps(documents, indent=2), encoding="utf-8")
    return path


def test_files_of_each_kind_are_compared(tmp_path: Path) -> None:
    one = report_file(tmp_path / "a.json", 3)
    other = report_file(tmp_path / "b.json", 9, candidate_sha256="3" * 64)
    counted = of_files([one, other])
    assert counted.drafts.names == ("bf16", "int4 (222222222222)", "int4 (333333333333)")
    assert counted.num_draft_tokens == 1
    change = draft_comparison.compare(counted, **USUAL).whole.changes[0]
    assert change.relative_change == pytest.approx(-0.003 / 1.602)
    text = one.read_text(encoding="utf-8").replace("\n", "")  # on one line it is a report still
    one.write_text(text, encoding="utf-8")
    assert of_files([one, other]).drafts.names == counted.drafts.names
    one.write_text(text_of(joint()), encoding="utf-8")
    assert len(of_files([one]).drafts.names) == 2
    counted = of_files([measurement_file(tmp_path / f"{name}.jsonl", drop)
                        for name, drop in (("a", 0), ("b", 1), ("c", 30))])  # fmt: skip
    whole = draft_comparison.compare(counted, **USUAL).whole
    assert whole.best == "a.jsonl"
    assert "c.jsonl" not in whole.alike
    bf16 = replay(spread(600), name="bf16")
    one = replay_file(tmp_path / "a.json", bf16, replay(noisy(3, 4), name="int4"))
    other = replay_file(tmp_path / "b.json", bf16, replay(noisy(9, 4), name="fp4"))
    counted = of_files([one, other])
    assert counted.drafts.names == ("bf16", "int4", "fp4")
    of_replay = of_replays([bf16, replay(noisy(3, 4))], ["1" * 64, "2" * 64], ())
    assert of_replay.drafts.sha256 == ("1" * 64, "2" * 64)
    assert counted.counted_by == of_replay.counted_by
    assert counted.drafts.tokens[1] == pytest.approx(of_replay.drafts.tokens[1])


OTHER_TRACES, DRAWN = dataclasses.replace(FIGURES, sha256="9" * 64), "probabilistic"
MOVED = replay(noisy(3, 4), traces=OTHER_TRACES)
REFUSED: dict[str, Callable[[Path, Path], object]] = {
    "traces": lambda a, b: report_file(a, 3) and report_file(b, 9, traces=OTHER_TRACES),
    "sampling": lambda a, b: report_file(a, 3) and report_file(b, 9, draft_sampling=DRAWN),
    "baseline": lambda a, b: report_file(a, 3) and report_file(b, 3, baseline_sha256="8" * 64),
    "counts": lambda a, b: report_file(a, 3) and report_file(b, 3, base=590),
    "servers": lambda a, _: a.write_text(text_of(served())),
    "nothing": lambda a, _: a.write_text(text_of(judge(replay(spread(600)), MOVED, RELEASE))),
    "temperature": lambda a, b: measurement_file(a, 0) and measurement_file(b, 0, temperature=1.0),
    "twice": lambda a, b: b.write_bytes(measurement_file(a, 0).read_bytes()),
    "kinds": lambda a, b: measurement_file(a, 0) and report_file(b, 3),
    "dtype": lambda a, b: replays(a) and replay_file(b, replay(noisy(3, 4)), dtype="bfloat16"),
    "replayed traces": lambda a, b: replays(a) and replay_file(b, MOVED),
    "K": lambda a, b: replays(a) and replay_file(b, replay([(1, 2, 3)] * 40)),
    "no K": lambda a, _: replays(a, num_draft_tokens=0),
    "columns": lambda a, _: replays(a, num_draft_tokens=2),
    "key": lambda a, _: replays(a, color=1),
    "list": lambda a, _: a.write_text("[1]"),
    "text": lambda a, _: a.write_text("no JSON"),
    "no file": lambda _, _b: None,
}


def replays(path: Path, **changes: Any) -> Path:
    return replay_file(path, replay(spread(600)), **changes)


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_compared(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    paths = [folder / "a.json", folder / "b.json"]
    REFUSED[name](*paths)
    with pytest.raises(DraftQuantError):
        of_files([paths[0], *filter(Path.exists, paths[1:])])


def test_steps_that_accept_nothing_and_are_left_out_are_missed(tmp_path: Path) -> None:
    one, silent = (measurement_file(tmp_path / f"{name}.jsonl", 0) for name in "ab")
    *setup, last = silent.read_text(encoding="utf-8").splitlines()
    found = json.loads(last)
    found["accepted"] = [step for step in found["accepted"] if step]
    found["histogram"][0] = 0
    silent.write_text("\n".join([*setup, json.dumps(found), ""]), encoding="utf-8")
    with pytest.raises(CompareError):
        of_files([one, silent])
