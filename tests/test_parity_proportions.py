"""McNemar's test, the score interval and pooled means against scipy and against enumeration."""

import itertools

import numpy as np
import pytest
from draftquant.validate.counting.paired_change import pooled_mean
from draftquant.validate.parity.task_findings import (
    Discordance,
    items_needed,
    mcnemar,
    score_bounds,
)
from scipy import stats


def counted(n: int, b: int, c: int) -> Discordance:
    return Discordance(num_items=n, only_first=b, only_second=c)


def test_mcnemar_is_the_sum_over_all_outcomes() -> None:
    """Every way in which b + c fair coins fall, at least as unlikely as this one."""
    for b, c in ((0, 0), (0, 5), (1, 5), (10, 3), (7, 7), (40, 60)):
        masses = stats.binom.pmf(np.arange(b + c + 1), b + c, 0.5)
        expected = masses[masses <= masses[b] * (1 + 1e-9)].sum()
        assert mcnemar(counted(1000, b, c)) == pytest.approx(expected)


def test_published_score_intervals() -> None:
    """Two-sided 95 %: Tango 1998 gives -0.059 to 0.118 for one discordant of 44 pairs."""
    lower, upper = score_bounds(counted(44, 0, 1), 0.975)
    assert (round(lower, 4), round(upper, 4)) == (-0.0594, 0.1181)


def test_no_discordance_is_not_certainty() -> None:
    z = stats.norm.ppf(0.95)
    for n in (1, 7, 1319):
        lower, upper = score_bounds(counted(n, 0, 0), 0.95)
        assert upper == pytest.approx(z**2 / (n + z**2), rel=1e-6)
        assert lower == pytest.approx(-upper)


def test_bounds_are_symmetric_and_hold_the_difference() -> None:
    for n, b, c in itertools.product((1, 5, 40), (0, 1, 5, 40), (0, 1, 5)):
        if b + c <= n:
            one, other = counted(n, b, c), counted(n, c, b)
            lower, upper = score_bounds(one, 0.9)
            assert -1 <= lower <= one.difference <= upper <= 1
            assert score_bounds(other, 0.9) == pytest.approx((-upper, -lower), abs=1e-9)
            assert (lower == -1) == (b == n)


@pytest.mark.parametrize(
    ("n", "share", "margin"), [(40, 0.06, 0.05), (60, 0.15, 0.02), (164, 0.02, 0.01)]
)
def test_coverage_by_enumeration(n: int, share: float, margin: float) -> None:
    """A server that loses the whole margin passes in at most 5.6 %; by Wald's interval up to 60 %.

    The largest of n = 50 to 1319, shares 1 to 15 % and margins 0.5 to 5 % is 5.4 %.
    """
    worse, better = (share + margin) / 2, (share - margin) / 2
    chance = [1 - share, worse, better]
    most = int(stats.binom.ppf(1 - 1e-5, n, worse)) + 1
    passed = wald = 0.0
    for b, c in itertools.product(range(most + 1), repeat=2):
        if b + c > n:
            continue
        mass = stats.multinomial.pmf([n - b - c, b, c], n, chance)
        found = counted(n, b, c)
        spread = 1.6449 * np.sqrt((found.share - found.difference**2) / n)
        wald += mass * (found.difference - spread > -margin)
        if mass > 1e-7:
            passed += mass * (score_bounds(found, 0.95)[0] > -margin)
    assert passed <= 0.056
    assert wald > passed


def test_items_that_a_proof_needs() -> None:
    """For a margin of 1 %, 1,237 items at 2 % discordance, 3,710 at 6 %; of 2 %, 310 and 928."""
    for margin, share, needed in ((0.01, 0.02, 1237), (0.01, 0.06, 3710), (0.02, 0.02, 310),
                                  (0.02, 0.06, 928)):  # fmt: skip
        assert items_needed(share, 0.0, margin, confidence=0.95) == needed
    assert items_needed(0.02, -0.01, 0.01, confidence=0.95) is None


# ---- pooled means


def test_with_equal_counts_the_bounds_are_students() -> None:
    values = np.array([0.1, 0.4, -0.2, 0.3, 0.25])
    found = pooled_mean(values, np.ones(5), confidence=0.95)
    error = stats.t.ppf(0.95, 4) * stats.sem(values)
    assert found.estimate == pytest.approx(values.mean())
    assert found.lower == pytest.approx(values.mean() - error)
    assert found.upper == pytest.approx(values.mean() + error)
    assert found.has_spread


def test_counts_are_weights() -> None:
    sums, counts = np.array([1.0, 6.0, 3.0]), np.array([10.0, 20.0, 30.0])
    found = pooled_mean(sums, counts, confidence=0.9)
    assert found.estimate == pytest.approx(10 / 60)
    without = [9 / 50, 4 / 40, 7 / 30]
    pseudo = [3 * 10 / 60 - 2 * x for x in without]
    error = stats.t.ppf(0.9, 60**2 / 1400 - 1) * stats.sem(pseudo)
    assert found.upper - found.estimate == pytest.approx(error)


def test_one_cluster_has_no_spread() -> None:
    found = pooled_mean([3.0], [6.0], confidence=0.95)
    assert (found.estimate, found.lower, found.upper) == (0.5, 0.5, 0.5)
    assert not found.has_spread
    with pytest.raises(ValueError, match="counts above 0"):
        pooled_mean([], [], confidence=0.95)
    with pytest.raises(ValueError, match="counts above 0"):
        pooled_mean([1.0, 2.0], [1.0, 0.0], confidence=0.95)
