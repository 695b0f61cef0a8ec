"""The gate of a draft that its target taught: two comparisons, one verdict, and no confusion."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from draftquant.scripts.commands.gate_report import print_judged
from draftquant.validate.judging.anomalies import Background
from draftquant.validate.judging.interim_analysis import Look
from draftquant.validate.judging.judgement import judge
from draftquant.validate.judging.retuned_gate import MARK, RetunedReport, judge_retuned
from handmade_replays import FIGURES, RELEASE, noisy, replay, spread
from test_doubts import ZERO

BASE = 600
"""Of 1000 steps of K = 1 accept the draft as released: acceptance length 1.602."""


def taught(gain: int, noise: int = 4) -> list[tuple[int, ...]]:
    return noisy(-gain, noise)


def judged(
    candidate: list[tuple[int, ...]], tuned: list[tuple[int, ...]], **background: Any
) -> RetunedReport:
    replays = [
        replay(spread(BASE), name="bf16"),
        replay(candidate, name="quant"),
        replay(tuned, name="tuned"),
    ]
    return judge_retuned(
        replays, RELEASE, background=Background(**background), tuned_sha256="7" * 64
    )


@pytest.mark.parametrize(
    ("candidate_gain", "tuned_gain", "verdict", "against_tuned", "against_bf16"),
    [
        (100, 101, "PASS", "PASS", "PASS"),  # 6 % above BF16, as BF16 taught alike
        (100, 150, "FAIL", "FAIL", "PASS"),  # above BF16, and still quantization cost 3 %
        (-40, -40, "FAIL", "PASS", "FAIL"),  # training ruined both alike
        (100, 118, "INCONCLUSIVE", "INCONCLUSIVE", "PASS"),
        (200, 30, "ANOMALOUS", "ANOMALOUS", "PASS"),  # rounding does not gain 10 %
        (-60, -160, "ANOMALOUS", "ANOMALOUS", "FAIL"),  # figures that are not believed come first
    ],
)
def test_a_pass_needs_both(
    candidate_gain: int, tuned_gain: int, verdict: str, against_tuned: str, against_bf16: str
) -> None:
    wide = 24 if verdict == "INCONCLUSIVE" else 4
    report = judged(taught(candidate_gain, wide), taught(tuned_gain, -wide))
    assert report.against_tuned.verdict == against_tuned
    assert report.against_bf16.verdict == against_bf16
    assert report.verdict == verdict
    assert report.exit_code == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "ANOMALOUS": 3}[verdict]
    assert (report.action is None) is (verdict == "PASS")


def test_the_change_by_training_is_no_interim_analysis() -> None:
    """Its bounds have the policy's confidence, whatever that of the look."""
    replays = [replay(spread(BASE)), replay(taught(100)), replay(taught(101))]
    look = Look(number=1, total=2, spending="pocock")
    report = judge_retuned(
        replays, RELEASE, look=look, background=Background(), tuned_sha256="7" * 64
    )
    assert report.training is not None
    assert report.training.confidence == RELEASE.confidence
    assert report.against_bf16.change is not None
    assert report.against_bf16.change.confidence > RELEASE.confidence


def test_without_the_mark_the_same_gain_is_anomalous() -> None:
    candidate = replay(taught(100))
    assert judge(replay(spread(BASE)), candidate, RELEASE).verdict == "ANOMALOUS"


def test_each_comparison_has_its_own_baseline() -> None:
    report = judged(taught(100), taught(101), baseline_sha256="1" * 64, candidate_sha256="2" * 64)
    assert report.against_bf16.baseline.name == "bf16"
    assert report.against_tuned.baseline.name == "tuned"
    assert report.against_bf16.background.baseline_sha256 == "1" * 64
    assert report.against_tuned.background.baseline_sha256 == "7" * 64
    for one in (report.against_bf16, report.against_tuned):
        assert one.candidate.name == "quant"
        assert one.background.candidate_sha256 == "2" * 64
    assert report.against_tuned.change is not None
    assert report.against_bf16.change is not None
    assert report.training is not None
    # Training times quantization is both, pooled over the prompts.
    product = (1 + report.training.relative_change) * (
        1 + report.against_tuned.change.relative_change
    )
    assert product == pytest.approx(1 + report.against_bf16.change.relative_change, rel=1e-6)


def test_what_is_known_of_the_draft_as_released_confirms_the_traces() -> None:
    traces = dataclasses.replace(FIGURES, features=ZERO)

    def verdict(expected: float | None) -> str:
        replays = [replay(h, traces=traces) for h in (spread(BASE), taught(100), taught(101))]
        known = Background(expected_baseline=expected)
        return judge_retuned(replays, RELEASE, background=known, tuned_sha256="7").verdict

    assert verdict(None) == "ANOMALOUS"
    assert verdict(1.6) == "PASS"
    assert verdict(1.2) == "ANOMALOUS"


def test_replays_of_different_things_are_not_compared() -> None:
    other = dataclasses.replace(FIGURES, sha256="1" * 64)
    replays = [
        replay(spread(BASE)), replay(taught(100), traces=other), replay(taught(101), traces=other),
    ]  # fmt: skip
    report = judge_retuned(replays, RELEASE, background=Background(), tuned_sha256="7")
    assert report.verdict == "ANOMALOUS"
    assert report.training is None
    assert report.to_mapping()["quantization_and_training_change"] is None


# ---- what is said


def texts(report: RetunedReport) -> Sequence[str]:
    return [report.reason, json.dumps(report.to_mapping())]


def test_every_report_says_retuned_and_both_figures(capsys: pytest.CaptureFixture[str]) -> None:
    report = judged(taught(100), taught(101), warnings=("look at this",))
    print_judged(report)
    printed = " ".join(capsys.readouterr().out.split())
    assert report.against_tuned.change is not None
    assert report.against_bf16.change is not None
    for text in (*texts(report), printed):
        assert MARK in text
        for change in (report.against_tuned.change, report.against_bf16.change):
            assert f"{change.relative_change:+.2%}" in text
    assert "against the identically fine-tuned BF16 draft (control): quantization alone" in printed
    assert "against the BF16 draft as released: quantization and fine-tuning" in printed
    assert "fine-tuning alone changed the BF16 draft by +6.3" in printed
    assert printed.count("warning: look at this") == 1
    said = (
        "PASS: RETUNED. Against the identically fine-tuned BF16 draft (quantization alone): PASS."
    )
    assert said in printed


def test_the_gain_is_never_called_quantization() -> None:
    """Of what is above BF16 every figure has the training beside it."""
    report = judged(taught(100), taught(101))
    mapping = report.to_mapping()
    assert mapping["mark"] == MARK
    assert mapping["quantization_change"] == pytest.approx(-1 / 1703, rel=0.05)
    assert mapping["training_change"] == pytest.approx(101 / 1602, rel=1e-3)
    assert mapping["quantization_and_training_change"] == pytest.approx(100 / 1602, rel=1e-3)
    assert "relative_change" not in mapping  # nobody takes one of the three for another
    assert mapping["exit_code"] == 0
    json.dumps(mapping, allow_nan=False)


def test_warnings_of_both_are_said_once() -> None:
    report = judged(taught(100), taught(101), warnings=("a", "b"))
    assert report.warnings[:2] == ("a", "b")
    assert len(set(report.warnings)) == len(report.warnings)


def test_a_plain_report_is_printed_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    print_judged(judge(replay(spread(BASE)), replay(noisy(3, 4)), RELEASE))
    printed = capsys.readouterr().out
    assert MARK not in printed
    assert "PASS: With 95% confidence the drop is smaller than the limit" in " ".join(
        printed.split()
    )
