"""Acceptance of one draft, expected rounds, the change between two, its bounds, prompts needed."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from draftquant.validate.counting.acceptance_counts import (
    AcceptanceCounts,
    pooled,
    repeated_ngram_share,
)
from draftquant.validate.counting.paired_change import (
    PairedChange,
    RequiredPrompts,
    paired_change,
    required_prompts,
)
from draftquant.validate.counting.trace_replay import (
    acceptance_probabilities,
    expected_steps,
    outcome_probabilities,
)
from scipy import stats


def counts(*histogram: float) -> AcceptanceCounts:
    return AcceptanceCounts(histogram=histogram)


def test_figures_by_hand() -> None:
    """10 steps: 4 accept nothing, 3 one, 2 two, 1 three: 3 + 4 + 3 = 10 of 30 draft tokens."""
    got = counts(4, 3, 2, 1)
    assert (got.num_draft_tokens, got.num_steps) == (3, 10)
    assert (got.num_accepted_draft_tokens, got.num_emitted_tokens) == (10, 20)
    assert got.mean_acceptance_length == 2.0
    assert got.draft_acceptance_rate == pytest.approx(1 / 3)
    assert got.survival == (0.6, 0.3, 0.1)
    assert got.conditional == pytest.approx((0.6, 0.5, 1 / 3))
    assert counts(5, 0, 0).conditional == (0.0, None)
    total = pooled([counts(0, 0, 10), counts(0, 90, 0)], 2)
    assert total == counts(0, 90, 10)  # 2.1, not the average of 3 and 2
    assert pooled([], 2) == counts(0, 0, 0)
    with pytest.raises(ValueError, match="zip"):
        counts(1, 2) + counts(1, 2, 3)


def test_repeated_8grams_by_hand() -> None:
    """1 2 .. 1 has four 8-grams, of which two repeat; a second text does not share them."""
    turns = [1, 2] * 5 + [1]
    for texts, share in (
        ([turns], 0.5), ([[*range(8)], [*range(8)]], 0.0), ([[1, 2, 3]], 0.0), ([], 0.0),
        ([turns, [*range(5, 16)]], 0.25), ([[7] * 16], 8 / 9),
    ):  # fmt: skip
        assert repeated_ngram_share(texts) == pytest.approx(share)


def test_change_by_hand() -> None:
    """Two prompts of 20 tokens, K = 1.

    baseline R = 10, 10 (AL 2); candidate R = 10, 12, emitted 20, 20. AL_q = 40 / 22.
    theta without the first is log((20 / 12) / 2) = log(5/6), without the second 0; so psi is
    2 theta - log(5/6) and 2 theta: sd = -log(5/6) / sqrt(2), SE = -log(5/6) / 2. Of equal length:
    N_eff = 2, one degree of freedom, t_{0.95, 1} = 6.3138.
    """
    change = paired_change([counts(0, 10)] * 2, [counts(0, 10), counts(4, 8)], confidence=0.95)
    assert change.log_ratio == pytest.approx(math.log(40 / 22 / 2))
    assert change.relative_change == pytest.approx(40 / 22 / 2 - 1)
    error = math.log(6 / 5) / 2
    assert change.standard_deviation == pytest.approx(error * math.sqrt(2))
    assert change.standard_error == pytest.approx(error)
    assert change.lower == pytest.approx(change.log_ratio - 6.313751515 * error)
    assert change.upper == pytest.approx(change.log_ratio + 6.313751515 * error)
    assert (change.num_prompts, change.effective_num_prompts) == (2, 2.0)


def test_a_rare_loss_widens_the_bound_below() -> None:
    """Nine prompts without a change and one that loses half: skewness -8/3.

    The bound below is where Hall's transformation of (estimate - truth) / SE, with twice that
    skewness, is t_{0.95, 9}; the bound above stays where it is.
    """
    baseline = [counts(0, 0, 0, 10)] * 10
    change = paired_change(baseline, [*baseline[1:], counts(0, 20, 0, 0)], confidence=0.95)
    assert change.skewness == pytest.approx(-8 / 3)
    quantile = float(stats.t.ppf(0.95, 9))
    a = 2 * change.skewness / math.sqrt(10)
    x = (change.log_ratio - change.lower) / change.standard_error
    assert x > 1.5 * quantile
    assert x + a * x**2 / 3 + a**2 * x**3 / 27 + a / 6 == pytest.approx(quantile)
    assert change.upper - change.log_ratio == pytest.approx(quantile * change.standard_error)


def test_what_changes_nothing_has_no_spread_whatever_rounding_leaves() -> None:
    """Twice the steps at the same lengths is no change; one step less in one prompt is a spread."""
    prompts = [counts(3, 2, 1), counts(1, 1, 9)]
    for before, after in (
        (prompts, prompts), ([counts(2, 2), counts(4, 8)], [counts(4, 4), counts(8, 16)]),
    ):  # fmt: skip
        change = paired_change(before, after, confidence=0.95)
        assert (change.log_ratio, change.lower) == (0.0, pytest.approx(0.0, abs=1e-14))
        assert not change.has_spread
    for last, spread in ((counts(4, 6), False), (counts(3, 7), True)):
        after = [*[counts(4, 6)] * 999, last]
        assert paired_change([counts(3, 7)] * 1000, after, confidence=0.95).has_spread == spread


def test_parts_of_steps_are_weights_alone() -> None:
    """Expected steps may be less than one in every prompt."""
    rows = ((6, 4), (5, 5), (2, 8)), ((7, 3), (6, 4), (2, 8))
    whole, parts = (
        paired_change(*([counts(a * share, b * share) for a, b in side] for side in rows),
                      confidence=0.95)
        for share in (1.0, 0.01)
    )  # fmt: skip
    assert parts.relative_bounds == pytest.approx(whole.relative_bounds, rel=1e-9)
    assert parts.effective_num_prompts == pytest.approx(whole.effective_num_prompts)


def test_what_has_no_change() -> None:
    for baseline, candidate, message in (
        ([counts(1, 1)], [counts(1, 1)], "two or more pairs"),
        ([counts(1, 1)] * 3, [counts(1, 1)] * 2, "got 3 and 2"),
        ([counts(1, 1), counts(0, 0)], [counts(1, 1)] * 2, "verify steps in every prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            paired_change(baseline, candidate, confidence=0.95)


def change_of(log_ratio: float, deviation: float, num_prompts: int = 2) -> PairedChange:
    return PairedChange(
        log_ratio=log_ratio,
        standard_deviation=deviation,
        standard_error=deviation / math.sqrt(num_prompts),
        lower=0.0,
        upper=0.0,
        confidence=0.95,
        num_prompts=num_prompts,
        effective_num_prompts=float(num_prompts),
        skewness=0.0,
    )


def test_required_prompts_by_hand() -> None:
    """Slack log(0.998) - log(0.995) = 0.0030105; (1.64485 + 0.84162) * 0.0189 / slack = 15.610.

    At 100 prompts the 20 and 80 % points lie 0.84162 * 0.00189 = 0.0015906 from the change: slack
    0.0046011 and 0.0014199, 10.214 and 33.097. Unchanged: slack 0.0050125, 9.3754.
    """
    change = change_of(math.log1p(-0.002), 0.0189, 100)
    got = required_prompts(change, max_relative_drop=0.005, power=0.8, min_prompts=2)
    assert got == RequiredPrompts(fewest=105, as_measured=244, most=1096, if_unchanged=88)
    # 100 prompts that say as much as 40: 30 effective ones are 75.
    change = dataclasses.replace(change_of(0.0, 0.001, 100), effective_num_prompts=40.0)
    got = required_prompts(change, max_relative_drop=0.01, power=0.8, min_prompts=30)
    assert got == RequiredPrompts(fewest=75, as_measured=75, most=75, if_unchanged=75)


def draw(generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Histograms [size, 4] of baseline and candidate on the same prompts, candidate 3 % worse.

    Each prompt has its own difficulty, its own loss, and a length: log-normal, heavy-tailed.
    """
    difficulty = generator.beta(8, 3, size)
    length = 60 + 60 * np.exp(2.0 * generator.standard_normal(size))
    histograms = []
    for loss in (0.0, 0.03):
        rate = np.clip(difficulty - loss + generator.normal(0, 0.02, size), 0.01, 0.99)
        reach = rate[:, None] ** np.arange(4)
        share = reach - np.append(reach[:, 1:], np.zeros((size, 1)), axis=1)
        steps = np.maximum(1, length / reach.sum(1)).astype(int)
        histograms.append(generator.multinomial(steps, share))
    return histograms[0], histograms[1]


def test_the_bounds_cover_the_truth_as_often_as_they_say() -> None:
    """One-sided 95 % bounds of the log ratio on simulated prompts, N = 30, 500 runs.

    Lengths are so heavy-tailed that 30 prompts count as 8. The truth is the ratio of a population
    of 200,000 prompts. Coverage has a standard error of sqrt(0.05 * 0.95 / 500) = 0.01. The
    linearised error with N - 1 degrees of freedom covers 0.875.
    """
    generator = np.random.default_rng(7)
    totals = (each.sum(0) for each in draw(generator, 200_000))
    before, after = (float(1 + (each * np.arange(4)).sum() / each.sum()) for each in totals)
    truth, num_runs, below, above = math.log(after / before), 500, 0, 0
    for _ in range(num_runs):
        rows = ([counts(*row) for row in side.tolist()] for side in draw(generator, 30))
        change = paired_change(*rows, confidence=0.95)
        below += change.lower <= truth
        above += truth <= change.upper
    assert 0.92 <= below / num_runs <= 0.98
    assert 0.92 <= above / num_runs <= 0.98


def enumerated(outcomes: list[list[float]], row: int = 0) -> list[float]:
    """Expected rounds by what they accept, from a row on: every way through, one by one."""
    expected = [0.0] * len(outcomes[0])
    if row >= len(outcomes):
        return expected
    for accepted, probability in enumerate(outcomes[row]):
        expected[accepted] += probability
        for j, count in enumerate(enumerated(outcomes, row + accepted + 1)):
            expected[j] += probability * count
    return expected


def test_expected_steps_are_those_of_every_way_through() -> None:
    for rows, depths in ((1, 1), (2, 7), (5, 2), (9, 3)):
        chance = torch.Generator().manual_seed(0)
        outcomes = outcome_probabilities(torch.rand((rows, depths), generator=chance).double())
        found = expected_steps(outcomes).histogram
        assert found == pytest.approx(enumerated(outcomes.tolist()), abs=1e-12)


def test_acceptance_is_a_ratio_and_at_most_one() -> None:
    q = torch.tensor([[0.2, 0.9, 0.0]]).log()
    p = torch.tensor([[0.4, 0.3, 0.5]]).log()
    assert acceptance_probabilities(q, p).tolist() == [pytest.approx([0.5, 1.0, 0.0])]
