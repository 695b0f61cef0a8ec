"""The sketch of a linear's inputs: against all the values themselves."""

import pytest
import torch
from draftquant.calibration.linear_inputs.input_range import FP8_MAX, InputRange
from replay_proof import fp8_rounded
from torch import Tensor


def values(seed: int = 0, count: int = 20_000) -> Tensor:
    """Heavy tails, zeros and signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp()
    return torch.where(torch.rand(count, generator=generator) < 0.1, 0.0, x)


def test_parts_add_up_to_the_whole() -> None:
    x, y = values(0), values(1, 500)
    both, whole = InputRange.of(x) + InputRange.of(y), InputRange.of(torch.cat([x, y]))
    assert torch.equal(both.bins, whole.bins)
    assert (both.num_small, both.absmax, both.count) == (whole.num_small, whole.absmax, 20_500)
    assert both.sum_squares == pytest.approx(whole.sum_squares, rel=1e-12)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999, 0.9999, 1.0])
def test_percentiles(share: float) -> None:
    x = values()
    exact = float(x.abs().sort().values[max(0, round(share * len(x)) - 1)])
    found = InputRange.of(x).percentile(share)
    assert exact <= found <= exact * 2 ** (1 / 64) + 1e-12


def test_absmax_and_rms_are_exact() -> None:
    x = values()
    found = InputRange.of(x.reshape(4, -1))
    assert found.absmax == float(x.abs().max())
    assert found.rms == pytest.approx(float(x.double().square().mean().sqrt()), rel=1e-9)


@pytest.mark.parametrize("factor", [1.0, 0.3, 1 / 64, 3.0])
def test_the_error_of_fp8_is_that_of_rounding(factor: float) -> None:
    x = values()
    scale = float(x.abs().max()) / FP8_MAX * factor
    rounded = fp8_rounded(x, torch.tensor(scale))
    exact = float((rounded - x).double().square().sum() / x.double().square().sum())
    assert InputRange.of(x).fp8_error(scale) == pytest.approx(exact, rel=0.05)


def test_the_best_scale_clips_where_that_pays() -> None:
    """Of the best of 64, and near absmax / 448 where nothing is gained by clipping."""
    x = torch.cat([values().clamp(-4, 4) / 4, torch.tensor([1.0])])
    assert InputRange.of(x).best_fp8_scale() == pytest.approx(1 / FP8_MAX, rel=0.3)
    small = torch.full((1_000_000,), 1e-5)
    found = InputRange.of(torch.cat([small, torch.tensor([0.01, 100.0])]))
    assert found.best_fp8_scale() <= 100 / FP8_MAX
    best = min(found.fp8_error(100 / FP8_MAX * 2 ** (-i / 8)) for i in range(64))
    assert found.fp8_error(found.best_fp8_scale()) == best


def test_what_lies_below_is_a_share_of_the_energy() -> None:
    x = torch.tensor([3.0, 4.0, 0.0])
    found = InputRange.of(x)
    assert found.share_below(3.5) == pytest.approx(9 / 25, rel=0.03)
    assert found.share_below(1.0) == 0
    assert found.share_below(100.0) == 1


def test_nothing_and_zeros() -> None:
    for x in (torch.zeros(0), torch.zeros(7)):
        found = InputRange.of(x)
        assert (found.absmax, found.rms, found.percentile(0.99)) == (0, 0, 0)
        assert found.best_fp8_scale() == 1.0
        assert found.fp8_error(1.0) == 0
        assert found.share_below(1.0) == 0


def test_the_ends_of_the_bins() -> None:
    x = torch.tensor([2.0**-41, 2.0**-40, 2.0**30])
    found = InputRange.of(x)
    assert (found.num_small, found.count, found.absmax) == (1, 3, 2.0**30)
    assert int(found.bins[0]) == 1
    assert int(found.bins[-1]) == 1
