"""Acceptance figures of one draft, worked by hand."""

import pytest
from draftquant.validate.counting.acceptance_counts import (
    AcceptanceCounts,
    pooled,
    repeated_ngram_share,
)


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


def test_repeated_8grams_by_hand() -> None:
    """1 2 .. 1 has four 8-grams, of which two repeat; a second text does not share them."""
    turns = [1, 2] * 5 + [1]
    assert repeated_ngram_share([turns]) == 0.5
    assert repeated_ngram_share([[*range(8)], [*range(8)]]) == 0.0
    assert repeated_ngram_share([turns, [*range(5, 16)]]) == 0.25
    assert repeated_ngram_share([[1, 2, 3]]) == 0.0
    assert repeated_ngram_share([]) == 0.0
    assert repeated_ngram_share([[7] * 16]) == pytest.approx(8 / 9)
