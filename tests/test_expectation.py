"""Expected rounds of drawn proposals: by enumeration of all that can happen, and by simulation."""

import pytest
import torch
from draftquant.validate.counting.trace_replay import (
    acceptance_probabilities,
    decoding_steps,
    expected_steps,
    outcome_probabilities,
    steps_at_every_row,
)
from torch import Tensor


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


def random_acceptance(rows: int, depths: int, seed: int = 0) -> Tensor:
    return torch.rand((rows, depths), generator=torch.Generator().manual_seed(seed)).double()


def test_expected_steps_are_those_of_every_way_through() -> None:
    for rows, depths in ((1, 1), (2, 7), (5, 2), (9, 3)):
        outcomes = outcome_probabilities(random_acceptance(rows, depths))
        found = expected_steps(outcomes).histogram
        assert found == pytest.approx(enumerated(outcomes.tolist()), abs=1e-12)


def test_certain_acceptance_counts_steps() -> None:
    """Where every c is 0 or 1 the expectation is what happens."""
    hits = (random_acceptance(200, 3) < 0.6).double()
    outcomes = outcome_probabilities(hits)
    accepted = hits.long().cumprod(dim=1).sum(dim=1).tolist()
    steps = decoding_steps(accepted)
    assert expected_steps(outcomes).histogram == tuple(steps.count(j) for j in range(4))
    assert steps_at_every_row(outcomes).histogram == tuple(accepted.count(j) for j in range(4))
    assert expected_steps(outcome_probabilities(random_acceptance(0, 3))).num_steps == 0


def test_acceptance_is_a_ratio_and_at_most_one() -> None:
    q = torch.tensor([[0.2, 0.9, 0.0]]).log()
    p = torch.tensor([[0.4, 0.3, 0.5]]).log()
    assert acceptance_probabilities(q, p).tolist() == [pytest.approx([0.5, 1.0, 0.0])]
