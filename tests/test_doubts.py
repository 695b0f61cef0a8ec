"""Figures that the gate does not believe: features, the target's head, the baseline's length."""

import dataclasses

import pytest
from draftquant.calibration.traces.trace_info import FeatureEvidence
from draftquant.recipes.errors import GateError
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.decision import min_baseline_length
from draftquant.validate.judging.judgement import GateReport, judge
from handmade_replays import BASELINE, FIGURES, RELEASE, noisy, replay

ZERO = FeatureEvidence(repeats=9000, constant=True, share={0: 0.0})
OTHERS = FeatureEvidence(repeats=9000, constant=False, share={-1: 0.004, 0: 0.005, 1: 0.003})
SHIFTED = FeatureEvidence(repeats=9000, constant=False, share={-1: 0.4, 0: 0.6, 1: 0.9})


def judged(
    baseline: list[tuple[int, ...]] = BASELINE,
    candidate: list[tuple[int, ...]] | None = None,
    features: FeatureEvidence = FIGURES.features,
    **known: float | bool,
) -> GateReport:
    traces = dataclasses.replace(FIGURES, features=features)
    return judge(
        replay(baseline, traces=traces),
        replay(candidate or noisy(3, 4), traces=traces),
        RELEASE,
        background=Background(**known),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        (ZERO, "The recorded features are all equal."),
        (OTHERS, "do not belong to the tokens beside them"),
        (SHIFTED, "shifted by +1 against their tokens"),
    ],
)
def test_features_of_other_text_are_anomalous(features: FeatureEvidence, reason: str) -> None:
    report = judged(features=features)
    assert (report.verdict, report.exit_code) == ("ANOMALOUS", 3)
    assert reason in report.reason
    assert report.traces.features == features
    confirmed = judged(features=features, expected_baseline=1.6)  # 1.602 was measured
    assert confirmed.verdict == "PASS"


def test_a_working_baseline_is_at_least_so_long() -> None:
    """1 + 0.55 + 0.55^2 + 0.55^3 by hand."""
    three, one = replay([(1, 1, 1, 1)]), replay([(1, 1)])
    assert min_baseline_length(three, RELEASE) == pytest.approx(2.018875)
    assert min_baseline_length(one, RELEASE) == pytest.approx(1.55)


def test_text_that_was_drawn_is_harder_to_guess() -> None:
    """Half the drawn tokens' probability, half the share: 1 + 0.275 + 0.275^2."""
    drawn = dataclasses.replace(FIGURES, temperature=1, mean_token_probability=0.5)
    baseline = replay([(1, 1, 1)], traces=drawn)
    assert min_baseline_length(baseline, RELEASE) == pytest.approx(1.350625)


def test_a_baseline_that_accepts_too_little_is_anomalous_unless_it_is_known() -> None:
    """A target of the same family that is not the draft's gave 1.87 where its own gives 2.90."""
    other = [(500 - i, 250, 130, 120 + i) for i in range(40)]
    report = judged(other, other)
    assert report.verdict == "ANOMALOUS"
    assert (
        "mean acceptance length of only 1.9285. With K = 3, a draft whose inputs are those it"
        in (report.reason)
    )
    assert report.action is not None
    assert "--expect-baseline AL" in report.action
    assert judged(other, other, expected_baseline=1.9).verdict == "PASS"
    with_more = judged(other, other, expected_baseline=2.1)
    assert with_more.verdict == "ANOMALOUS"
    assert "--expect-baseline says 2.1" in with_more.reason


@pytest.mark.parametrize(
    ("expected", "verdict"),
    [(1.526, "PASS"), (1.525, "ANOMALOUS"), (1.686, "PASS"), (1.687, "ANOMALOUS")],
)
def test_what_is_expected_holds_within_five_percent(expected: float, verdict: str) -> None:
    """1.602 / 1.05 = 1.52571 and 1.602 / 0.95 = 1.68632."""
    assert judged(expected_baseline=expected).verdict == verdict


@pytest.mark.parametrize("expected", [1.0, 2.5, -1.0, float("nan"), float("inf")])
def test_an_acceptance_length_that_is_none(expected: float) -> None:
    with pytest.raises(GateError, match=r"--expect-baseline: expected a mean acceptance length in"):
        judged(expected_baseline=expected)


def test_the_targets_head_says_what_the_target_said() -> None:
    assert judged(head_agreement=0.98).verdict == "PASS"
    report = judged(head_agreement=0.97, expected_baseline=1.602)
    assert report.verdict == "ANOMALOUS"
    assert "reproduces only 97.0% of the recorded tokens" in report.reason


def test_two_drafts_on_purpose_may_differ_by_much() -> None:
    better = noisy(-90, 4)
    assert judged(candidate=better).verdict == "ANOMALOUS"
    assert judged(candidate=better, unrelated=True).verdict == "PASS"


def test_the_report_names_target_and_drafts() -> None:
    traces = dataclasses.replace(FIGURES, features=OTHERS)
    background = Background(baseline_sha256="b" * 64, candidate_sha256="c" * 64)
    report = judge(replay(BASELINE, traces=traces), replay(BASELINE, traces=traces), RELEASE,
                   background=background)  # fmt: skip
    found = report.to_mapping()
    assert found["traces"]["target"]["weights_sha256"] == FIGURES.target.weights_sha256
    assert found["background"]["baseline_sha256"] == "b" * 64
    assert found["background"]["candidate_sha256"] == "c" * 64
