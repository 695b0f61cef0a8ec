"""Latents: bit for bit the codes that they stand for, with the gradients of the estimator."""

import dataclasses
import math

import pytest
import torch
from draftquant.calibration.rounding.latents import LatentWeight, straight_through
from draftquant.quantize.algorithms import get_algorithm
from draftquant.quantize.numerics.number_formats import FP8, FP8_MAX, SMALLEST_E4M3, SMALLEST_SCALE
from draftquant.recipes import Algorithm, WeightFormat
from test_algorithms import INT4, INT4_F16, INT4_GROUPS, MXFP4, NVFP4, gaussian
from torch import Tensor

CPU = torch.device("cpu")
FORMATS = {
    "int4": INT4, "int4-groups": INT4_GROUPS, "int4-f16": INT4_F16, "nvfp4": NVFP4, "mxfp4": MXFP4,
}  # fmt: skip
MSE = get_algorithm(Algorithm(scale="mse", rounding="nearest"))
ABSMAX = get_algorithm(Algorithm(scale="absmax", rounding="nearest"))
LARGEST = torch.tensor([[6.0]])
"""Of the weight and of those that engines fuse with it."""


def latent(weights: WeightFormat, w: Tensor | None = None) -> LatentWeight:
    return LatentWeight(gaussian() if w is None else w, weights, MSE, absmax=LARGEST, device=CPU)


def moved(weights: WeightFormat) -> LatentWeight:
    """Latents and scales moved at random, as by many steps."""
    one = latent(weights)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        one.codes += torch.randn(one.codes.shape, generator=generator)
        if one.log_scales is not None:
            one.log_scales += 0.3 * torch.randn(one.log_scales.shape, generator=generator)
    return one


@pytest.mark.each_value
@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("start", [ABSMAX, MSE], ids=["absmax", "mse"])
def test_the_first_codes_and_scales_are_those_of_the_algorithm(
    weights: WeightFormat, start: object
) -> None:
    w = gaussian()
    found = LatentWeight(w, weights, start, absmax=LARGEST, device=CPU).quantized()  # type: ignore[arg-type]
    wanted = start.quantize(w, weights, absmax=LARGEST, moments=None)  # type: ignore[attr-defined]
    assert torch.equal(found.codes, wanted.codes)
    assert found.scale.dtype == wanted.scale.dtype
    assert torch.equal(found.scale.float(), wanted.scale.float())
    assert (found.global_scale is None) == (wanted.global_scale is None)
    if found.global_scale is not None and wanted.global_scale is not None:
        assert torch.equal(found.global_scale, wanted.global_scale)
    assert found.group_size == weights.group_size


@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
def test_what_is_multiplied_is_what_is_stored(weights: WeightFormat) -> None:
    one = moved(weights)
    stored = one.quantized()
    assert torch.equal(one.dequantized(), stored.dequantized())
    before = latent(weights).quantized()
    assert (stored.codes != before.codes).float().mean() > 0.3
    changed = not torch.equal(stored.scale.float(), before.scale.float())
    assert changed is (weights.dtype != "mxfp4")


@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
def test_gradients_go_through_both_roundings(weights: WeightFormat) -> None:
    """Of sum(G * code * scale): G * scale for a code, sum of G * code * free scale for its log."""
    one = moved(weights)
    gradient = gaussian(seed=3).float()
    (one.dequantized() * gradient).sum().backward()
    stored = one.quantized()
    ones = dataclasses.replace(stored, codes=_codes_of_one(stored.codes))
    scale = ones.dequantized()
    torch.testing.assert_close(one.codes.grad, gradient * scale, rtol=1e-6, atol=0)
    if one.log_scales is None:
        return
    assert one.log_scales.grad is not None
    values = stored.dequantized() / scale
    first = latent(weights).quantized()
    free = first.scale.float() * one.log_scales.detach().exp()
    if first.global_scale is not None:
        free = free * first.global_scale
    wanted = (gradient * values).view(*free.shape, -1).sum(-1) * free
    torch.testing.assert_close(one.log_scales.grad, wanted, rtol=1e-4, atol=1e-6)


def _codes_of_one(codes: Tensor) -> Tensor:
    """Codes whose value is 1: of INT4 the number itself, of FP4 the third one."""
    return torch.full_like(codes, 1 if codes.dtype == torch.int8 else 2)


@pytest.mark.each_value
@pytest.mark.parametrize("weights", [INT4, INT4_F16, NVFP4], ids=["int4", "int4-f16", "nvfp4"])
@pytest.mark.parametrize("power", [-60.0, 60.0])
def test_scales_stay_such_as_can_be_stored(weights: WeightFormat, power: float) -> None:
    if weights.dtype == "int4" and power > 0:
        power = 10.0  # above, float16 overflows; no step comes near
    one = latent(weights)
    with torch.no_grad():
        assert one.log_scales is not None
        one.log_scales += power
    scale = one.quantized().scale
    assert scale.float().isfinite().all()
    if power > 0:
        assert weights.dtype == "int4" or (scale.float() == FP8_MAX).all()
    else:
        smallest = SMALLEST_E4M3 if weights.dtype == "nvfp4" else SMALLEST_SCALE
        assert (scale.float() == smallest).all()
    assert scale.dtype == (
        FP8 if weights.dtype == "nvfp4" else latent(weights).quantized().scale.dtype
    )
    assert torch.equal(one.dequantized(), one.quantized().dequantized())


@pytest.mark.parametrize(("weights", "low", "high"), [(INT4, -8.5, 7.5), (NVFP4, -7, 7)])
def test_latents_beyond_the_last_code_come_back(
    weights: WeightFormat, low: float, high: float
) -> None:
    one = latent(weights)
    with torch.no_grad():
        one.codes[0], one.codes[1] = 100.0, -100.0
    one.keep_within_reach()
    assert (one.codes[0] == high).all()
    assert (one.codes[1] == low).all()
    values = one.quantized()
    assert values.codes[0].unique().numel() == 1


def test_straight_through_is_exact() -> None:
    """Adding a difference to a value would round it: 1e8 + 1 is 1e8 in float32."""
    free = torch.tensor([1e8, -3.7, 0.1], requires_grad=True)
    value = torch.tensor([1.0, -4.0, 1 / 3])
    found = straight_through(value, free)
    assert torch.equal(found, value)
    found.backward(torch.tensor([2.0, math.pi, -1.0]))
    assert torch.equal(free.grad, torch.tensor([2.0, math.pi, -1.0]))
