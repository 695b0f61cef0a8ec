"""Acceptance figures and the confidence bound: worked by hand, and covered as often as promised."""

import math

import numpy as np
import pytest
from draftquant.validate.statistics import (
    AcceptanceCounts,
    PairedChange,
    paired_change,
    pooled,
    repeated_ngram_share,
    required_num_prompts,
)
from scipy import stats


def counts(*histogram: int) -> AcceptanceCounts:
    return AcceptanceCounts(histogram=histogram)


def test_figures_by_hand() -> None:
    """10 steps: 4 accept nothing, 3 one, 2 two, 1 three: 3 + 4 + 3 = 10 of 30 draft tokens."""
    got = counts(4, 3, 2, 1)
    assert got.num_draft_tokens == 3
    assert got.num_steps == 10
    assert got.num_accepted_draft_tokens == 10
    assert got.num_emitted_tokens == 20
    assert got.mean_acceptance_length == 2.0
    assert got.draft_acceptance_rate == pytest.approx(1 / 3)
    assert got.survival == (0.6, 0.3, 0.1)
    assert got.conditional == pytest.approx((0.6, 0.5, 1 / 3))
    assert 1 + sum(got.survival) == pytest.approx(got.mean_acceptance_length)


def test_nothing_and_everything_accepted() -> None:
    assert counts(5, 0, 0).mean_acceptance_length == 1.0
    assert counts(5, 0, 0).conditional == (0.0, None)
    assert counts(0, 0, 5).mean_acceptance_length == 3.0
    assert counts(0, 0, 5).draft_acceptance_rate == 1.0


def test_counts_are_pooled_not_averaged() -> None:
    """A prompt of 10 steps at 3.0 and one of 90 at 2.0 give 2.1, not 2.5."""
    total = pooled([counts(0, 0, 10), counts(0, 90, 0)], 2)
    assert total == counts(0, 90, 10)
    assert total.mean_acceptance_length == pytest.approx(2.1)
    assert pooled([], 2) == counts(0, 0, 0)
    with pytest.raises(ValueError, match="zip"):
        counts(1, 2) + counts(1, 2, 3)


def test_change_by_hand() -> None:
    """Two prompts of 20 tokens, K = 1.

    baseline R = 10, 10 (AL 2); candidate R = 10, 12, emitted 20, 20. AL_q = 40 / 22.
    psi = T_q/20 - R_q/11 - T_b/20 + R_b/10 = -10/11 + 1, -12/11 + 1 = +1/11, -1/11.
    sd = sqrt(2) / 11, SE = 1 / 11, t_{0.95, 1} = 6.3138.
    """
    change = paired_change(
        [counts(0, 10), counts(0, 10)], [counts(0, 10), counts(4, 8)], confidence=0.95
    )
    assert change.log_ratio == pytest.approx(math.log(40 / 22 / 2))
    assert change.relative_change == pytest.approx(40 / 22 / 2 - 1)
    assert change.standard_deviation == pytest.approx(math.sqrt(2) / 11)
    assert change.standard_error == pytest.approx(1 / 11)
    assert change.lower == pytest.approx(change.log_ratio - 6.313751515 / 11)
    assert change.upper == pytest.approx(change.log_ratio + 6.313751515 / 11)
    assert change.num_prompts == 2


def test_equal_drafts_change_nothing() -> None:
    prompts = [counts(3, 2, 1), counts(1, 1, 9)]
    change = paired_change(prompts, prompts, confidence=0.95)
    assert (change.log_ratio, change.standard_error, change.lower) == (0.0, 0.0, 0.0)


def test_unequal_token_totals_enter_the_ratio() -> None:
    """Twice the steps at the same lengths is no change, although R alone doubled."""
    baseline = [counts(2, 2), counts(4, 8)]
    candidate = [counts(4, 4), counts(8, 16)]
    change = paired_change(baseline, candidate, confidence=0.9)
    assert change.log_ratio == 0.0
    assert change.standard_error == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(
    ("baseline", "candidate", "message"),
    [
        ([counts(1, 1)], [counts(1, 1)], "two or more pairs"),
        ([counts(1, 1)] * 3, [counts(1, 1)] * 2, "got 3 and 2"),
        ([counts(1, 1), counts(0, 0)], [counts(1, 1)] * 2, "at least one verify step"),
    ],
)
def test_what_has_no_change(
    baseline: list[AcceptanceCounts], candidate: list[AcceptanceCounts], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        paired_change(baseline, candidate, confidence=0.95)


def change_of(log_ratio: float, deviation: float) -> PairedChange:
    return PairedChange(
        log_ratio=log_ratio,
        standard_deviation=deviation,
        standard_error=0.0,
        lower=0.0,
        upper=0.0,
        confidence=0.95,
        num_prompts=2,
    )


@pytest.mark.parametrize(
    ("deviation", "margin", "power", "expected"),
    [
        # N = ((z_0.95 + z_power) sd / margin)^2 for an unchanged draft, tabulated when the gate was
        # designed with margin instead of -log(1 - margin): at most 3 % more.
        (0.0189, 0.005, 0.8, 89), (0.0189, 0.005, 0.9, 122), (0.0189, 0.01, 0.8, 23),
        (0.0278, 0.005, 0.8, 192), (0.0278, 0.01, 0.8, 48), (0.0278, 0.01, 0.9, 67),
        (0.0313, 0.01, 0.8, 61), (0.0313, 0.02, 0.8, 16), (0.0313, 0.03, 0.8, 7),
    ],
)  # fmt: skip
def test_required_prompts(deviation: float, margin: float, power: float, expected: int) -> None:
    got = required_num_prompts(change_of(0.0, deviation), max_relative_drop=margin, power=power)
    assert got is not None
    assert 0.97 * expected - 1 <= got <= expected


def test_required_prompts_by_hand() -> None:
    """Slack log(0.998) - log(0.995) = 0.0030105; (1.64485 + 0.84162) * 0.0189 / slack = 15.610."""
    change = change_of(math.log1p(-0.002), 0.0189)
    assert required_num_prompts(change, max_relative_drop=0.005, power=0.8) == 244


def test_more_prompts_do_not_help_a_draft_beyond_the_limit() -> None:
    change = change_of(math.log1p(-0.02), 0.03)
    assert required_num_prompts(change, max_relative_drop=0.02, power=0.8) is None
    assert required_num_prompts(change, max_relative_drop=0.01, power=0.8) is None
    assert required_num_prompts(change_of(0.0, 0.0), max_relative_drop=0.01, power=0.8) == 2


def test_required_prompts_reach_the_promised_power() -> None:
    """With the N that the formula gives, the share of passes is the power, here 0.8.

    2000 simulated gates: the standard error of the share is sqrt(0.8 * 0.2 / 2000) = 0.009; the t
    quantile costs another 0.01 at this N. +-0.04 is beyond 3 standard errors.
    """
    deviation, margin = 0.03, 0.01
    needed = required_num_prompts(change_of(0.0, deviation), max_relative_drop=margin, power=0.8)
    assert needed == 56
    generator = np.random.default_rng(0)
    psi = generator.normal(0.0, deviation, (2000, needed))
    error = psi.std(axis=1, ddof=1) / math.sqrt(needed)
    lower = psi.mean(axis=1) - stats.t.ppf(0.95, needed - 1) * error
    assert abs((lower > math.log1p(-margin)).mean() - 0.8) < 0.04


def test_the_bounds_cover_the_truth_as_often_as_they_say() -> None:
    """One-sided 95 % bounds of the log ratio on simulated prompts, N = 30, 1000 runs.

    Each prompt has its own difficulty and length; both drafts decode it. The truth is the ratio of
    a population of 200000 prompts. Coverage has a standard error of sqrt(0.05 * 0.95 / 1000) =
    0.0069; linearisation at N = 30 costs up to 0.01 (0.943 was measured when the rule was chosen).
    [0.92, 0.975] is beyond 3 standard errors: a wrong seed fails 1 time in 1000, a missing factor
    sqrt(2) in the standard error gives 0.88 or 0.99.
    """
    generator = np.random.default_rng(7)
    num_runs, num_prompts, num_draft_tokens = 1000, 30, 3

    def draw(size: int) -> tuple[np.ndarray, np.ndarray]:
        """Histograms [size, K + 1] of baseline and candidate on the same prompts."""
        difficulty = generator.beta(8, 3, size)
        length = generator.integers(60, 240, size)
        histograms = []
        for loss in (0.0, 0.03):
            rate = np.clip(difficulty - loss + generator.normal(0, 0.02, size), 0.01, 0.99)
            reach = rate[:, None] ** np.arange(num_draft_tokens + 1)
            share = reach - np.append(reach[:, 1:], np.zeros((size, 1)), axis=1)
            steps = np.maximum(1, length / reach.sum(1)).astype(int)
            histograms.append(generator.multinomial(steps, share))
        return histograms[0], histograms[1]

    def mean_length(histograms: np.ndarray) -> float:
        total = histograms.sum(0)
        return float(1 + (total * np.arange(num_draft_tokens + 1)).sum() / total.sum())

    population = draw(200_000)
    truth = math.log(mean_length(population[1]) / mean_length(population[0]))
    below = above = 0
    for _ in range(num_runs):
        baseline, candidate = draw(num_prompts)
        change = paired_change(
            [counts(*row) for row in baseline.tolist()],
            [counts(*row) for row in candidate.tolist()],
            confidence=0.95,
        )
        below += change.lower <= truth
        above += truth <= change.upper
    assert 0.92 <= below / num_runs <= 0.975
    assert 0.92 <= above / num_runs <= 0.975


def test_repeated_ngrams_by_hand() -> None:
    """1 2 1 2 1: bigrams 12 21 12 21, two of four repeat; a second text does not share them."""
    assert repeated_ngram_share([[1, 2, 1, 2, 1]], order=2) == 0.5
    assert repeated_ngram_share([[1, 2, 3], [1, 2, 3]], order=2) == 0.0
    assert repeated_ngram_share([[1, 2, 1, 2, 1], [5, 6, 7, 8, 9]], order=2) == 0.25
    assert repeated_ngram_share([[1, 2, 3]]) == 0.0
    assert repeated_ngram_share([]) == 0.0
    assert repeated_ngram_share([[7] * 16]) == pytest.approx(8 / 9)
