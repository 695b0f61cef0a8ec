"""Algorithms: the scale search against an exhaustive one."""

import numpy as np
import pytest
import torch
from draftquant.quantize.algorithms import InputMoments, row_algorithm
from draftquant.quantize.backends import get_backend
from draftquant.quantize.numerics.number_formats import fp4_codes, fp4_values
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight
from draftquant.recipes import Algorithm, WeightFormat
from weight_formats import FP8_CHANNEL, INT4, INT4_GROUPS, MXFP4, NVFP4

ABSMAX = Algorithm(scale="absmax", rounding="nearest")
MSE = Algorithm(scale="mse", rounding="nearest")
INT4_F16 = WeightFormat(
    dtype="int4", granularity="group", symmetric=True, group_size=32, scale_dtype="float16"
)
SEARCHED = {
    "int4": INT4, "int4-groups": INT4_GROUPS, "int4-f16": INT4_F16, "fp8": FP8_CHANNEL,
    "nvfp4": NVFP4, "mxfp4": MXFP4,
}  # fmt: skip


def gaussian(rows: int = 24, columns: int = 96, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16()


def quantized(algorithm: Algorithm, weights: WeightFormat, w: torch.Tensor) -> QuantizedWeight:
    return get_backend("torch", algorithm).quantize(w, weights)


def errors(found: QuantizedWeight, w: torch.Tensor, size: int) -> torch.Tensor:
    """Sum of squared errors of each group."""
    return (found.dequantized() - w.float()).double().square().reshape(-1, size).sum(1)


def test_cards_and_errors_say_that_weights_were_corrected() -> None:
    gptq = Algorithm(scale="mse", rounding="gptq")
    assert str(gptq) == "scale mse, rounding gptq"
    corrected = Algorithm(scale="mse", rounding="gptq", input_correction="auto")
    assert str(corrected) == "scale mse, rounding gptq, corrected for rounded inputs"


@pytest.mark.parametrize("weights", SEARCHED.values(), ids=SEARCHED)
def test_no_group_is_worse_than_under_absmax_and_the_sum_is_better(weights: WeightFormat) -> None:
    w = gaussian()
    size = weights.group_size or w.shape[1]
    absmax, mse = (errors(quantized(a, weights, w), w, size) for a in (ABSMAX, MSE))
    assert (mse <= absmax * (1 + 1e-6)).all()
    # MXFP4 has no better one, and FP8's steps grow with the weights.
    share = {"mxfp4": 1.0, "fp8_e4m3": 0.98, "nvfp4": 0.85}.get(weights.dtype, 0.91)
    assert mse.sum() <= share * absmax.sum()


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_int4_scale_is_the_best_of_all_candidates(dtype: type) -> None:
    """All 28 candidates of each row, in numpy, as the recipe's documentation states them."""
    w = gaussian(16, 64, seed=3).to(torch.float16 if dtype is np.float16 else torch.float32)
    found = quantized(MSE, INT4, w)
    rows = w.numpy().astype(np.float32)
    for row, scale in zip(rows, found.scale.numpy()[:, 0], strict=True):
        absmax = dtype(dtype(np.abs(row).max()) / dtype(7.5))
        shares = [i / 32 for i in range(8, 35)] + [15 / 14]
        tried = [dtype(np.float32(absmax) * np.float32(share)) for share in shares]
        lost = []
        for s in tried:
            codes = np.clip(np.rint(row * (np.float32(1) / np.float32(s))), -8, 7)
            lost.append(((row - codes * np.float32(s)).astype(np.float64) ** 2).sum())
        best = min(lost)
        assert scale in tried
        assert lost[tried.index(scale)] == pytest.approx(best, rel=1e-5)


def importance(columns: int) -> InputMoments:
    """Inputs of which some are a hundred times as large as others."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(9))
    spread = torch.logspace(-2, 2, columns)[order]
    return InputMoments(torch.diag(spread), torch.device("cpu"), precise=False, name="test")


@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "by-inputs"])
def test_no_nvfp4_scale_that_can_be_stored_is_better(weighted: bool) -> None:
    """Of all 126 positive numbers of FP8_CHANNEL those from 1 to 1.5 of the absmax scale."""
    w = gaussian(8, 64, seed=5)
    w[0, :16] = 2.0**-20  # the smallest scale there is
    moments = importance(64) if weighted else None
    algorithm = row_algorithm(MSE)
    found = algorithm.quantize(w, NVFP4, absmax=None, moments=moments)
    assert found.global_scale is not None
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    counts = torch.ones(64) if moments is None else moments.squares
    larger = 0
    for group, counted, own in zip(
        w.float().reshape(-1, 16), counts.repeat(8).reshape(-1, 16), found.scale.reshape(-1),
        strict=True,
    ):  # fmt: skip
        exact = group.abs().max() / 6 / found.global_scale
        ends = (exact * torch.tensor([1.0, 1.5])).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
        tried = every[(every >= ends[0].float()) & (every <= ends[1].float())]
        steps = (tried * found.global_scale)[:, None]
        lost = ((fp4_values(fp4_codes(group / steps)) * steps - group) ** 2 * counted).sum(1)
        assert lost[tried == own.float()].item() == pytest.approx(lost.min().item(), rel=1e-5)
        larger += bool(own.float() > exact * 1.1)
    assert larger > 5  # four over six, or nearly


@pytest.mark.parametrize("weights", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
def test_fp4_is_never_clipped(weights: WeightFormat) -> None:
    """One weight of 100 among some of 1: no scale is below that of absmax."""
    w = gaussian()
    w[:, ::16] *= 100
    absmax, mse = quantized(ABSMAX, weights, w), quantized(MSE, weights, w)
    assert (mse.scale.float() >= absmax.scale.float()).all()
    if weights is MXFP4:
        assert torch.equal(mse.codes, absmax.codes)


def test_zero_rows_keep_their_absmax_scale() -> None:
    w = gaussian()
    w[3] = 0
    for weights in SEARCHED.values():
        absmax, mse = quantized(ABSMAX, weights, w), quantized(MSE, weights, w)
        assert torch.equal(absmax.scale[3].float(), mse.scale[3].float())
        assert (mse.dequantized()[3] == 0).all()
