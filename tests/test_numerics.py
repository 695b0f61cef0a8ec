"""Numerics against numbers worked by hand, against compressed-tensors, and their bounds."""

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from draftquant.quantize.algorithms import InputMoments, row_algorithm
from draftquant.quantize.backends import get_backend
from draftquant.quantize.numerics.number_formats import (
    FP8,
    fp4_codes,
    fp4_values,
    fp8_codes,
    integer_codes,
    integer_scale,
    mxfp4_codes,
    mxfp4_scale,
    nvfp4_global_scale,
    nvfp4_scale,
    rounded_values,
)
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight, code_values
from draftquant.quantize.stored.layouts.scheme import INTEGERS
from draftquant.recipes import Algorithm, WeightFormat
from draftquant.recipes.formats import NUMBER_FORMATS
from gptq_textbook import gaussian
from torch import Tensor
from weight_formats import FP8_CHANNEL, INT4, INT4_GROUPS, MXFP4, NVFP4


# Rows whose largest magnitude is 7.5, so that the scale is exactly 1.
def test_int4_multiplies_by_the_reciprocal() -> None:
    """45.5 / 7 is the tie 6.5 and goes to 6; float32(1 / 7) lies above 1/7 and leads to 7."""
    value, scale = torch.tensor([[45.5]]), torch.tensor([[7.0]])
    assert torch.round(value / scale).item() == 6
    assert integer_codes(value, scale).tolist() == [[7]]


# value / scale with scale 1 -> byte: sign, 4 exponent bits (bias 7), 3 mantissa bits.
GOLDEN_FP8 = [
    (0.0, 0x00), (-0.0, 0x80), (1.0, 0x38), (-1.0, 0xB8), (1.125, 0x39),
    (447.0, 0x7E), (449.0, 0x7E), (-449.0, 0xFE), (1e30, 0x7E),
    (432.0, 0x7E), (400.0, 0x7C), (17.0, 0x58), (19.0, 0x5A),  # half way: to even
    (2.0**-6, 0x08), (2.0**-9, 0x01), (-(2.0**-9), 0x81),  # smallest normal, subnormal
    (2.0**-10, 0x00), (-(2.0**-10), 0x80), (3 * 2.0**-10, 0x02),  # to even
]  # fmt: skip


def test_fp8_bytes_by_hand() -> None:
    codes = fp8_codes(torch.tensor([[value for value, _ in GOLDEN_FP8]]), torch.ones(1, 1))
    assert codes.dtype == FP8
    assert codes.view(torch.uint8).tolist() == [[byte for _, byte in GOLDEN_FP8]]


def test_fp8_is_rounded_once() -> None:
    """3.21875 / 3.0282 = 1.06292 goes up to 1.125; in bfloat16 it is the tie 1.0625, down to 1."""
    weight = torch.tensor([[3.21875]], dtype=torch.bfloat16)
    scale = torch.tensor([[3.0282]])
    assert (weight / scale.bfloat16()).to(FP8).view(torch.uint8).item() == 0x38
    assert fp8_codes(weight, scale).view(torch.uint8).item() == 0x39


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_those_of_compressed_tensors(bits: int) -> None:
    weight, number = gaussian(24, 40, 0), NUMBER_FORMATS[INTEGERS[bits]]
    args = QuantizationArgs(num_bits=bits, type="int", strategy="channel", symmetric=True)
    low, high = weight.aminmax(dim=1, keepdim=True)
    theirs, zero_point = calculate_qparams(low, high, args)
    scale = integer_scale(weight, number=number)
    assert torch.equal(scale, theirs)
    assert not zero_point.any()
    codes = integer_codes(weight, scale, number=number)
    exact = weight.float() / scale.float()
    assert (codes - exact).abs().max() <= 0.501 + 0.5 * 2.0**-9 * 2**bits  # of the scale's dtype
    assert codes.max() == number.largest


def test_fp4_keeps_the_sign_of_what_rounds_to_zero_and_mxfp4_does_not() -> None:
    """0.25 is the tie between 0 and 0.5 and goes to zero; -0.0 has no sign to keep."""
    x = torch.tensor([[-0.25, 0.25, -0.0, -0.26, -6.0, 5.0, 5.1]])
    assert fp4_codes(x).tolist() == [[8, 0, 0, 9, 15, 6, 7]]
    assert mxfp4_codes(x, torch.ones(1, 1)).tolist() == [[0, 0, 0, 9, 15, 6, 7]]


def fp4_codes_by_comparison(x: Tensor) -> Tensor:
    """One boundary after the other; a tie goes to the even code."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    for boundary, tie_goes_up in ((0.75, True), (1.25, False), (1.75, True),
                                  (2.5, False), (3.5, True), (5.0, False)):  # fmt: skip
        code += size >= boundary if tie_goes_up else size > boundary
    return code | ((x < 0).to(torch.uint8) << 3)


def test_fp4_codes_of_every_bfloat16_and_of_the_neighbours_of_every_tie() -> None:
    """Under some scales; infinities saturate, what is no number is zero, whatever its bits."""
    every = (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 2.0, 4.0]).view(torch.int32)
    near = torch.cat([ties + step for step in (-2, -1, 0, 1, 2)]).view(torch.float32)
    sweep = torch.arange(0x3E000000, 0x41000000, 997, dtype=torch.int32).view(torch.float32)
    odd = torch.tensor([0x7F800001, 0x7FC00007, -1, 1, -0x7FFFFFFF], dtype=torch.int32)
    scaled = [every / scale for scale in (1.0, 0.3, 7e-3, 2.0**-126)]
    x = torch.cat([*scaled, near, -near, sweep, -sweep, odd.view(torch.float32)])
    assert torch.equal(fp4_codes(x), fp4_codes_by_comparison(x))
    assert torch.equal(rounded_values("nvfp4", x[x == x]), code_values(fp4_codes(x[x == x])))


def test_nvfp4_scales_by_hand() -> None:
    """2688 / 2688 = 1; under it 1/6 of 2688, 9, 0.1, 1e-6 and 0, rounded to E4M3.

    0.1 / 6 = 0.01667 is a little nearer to 0.017578 than to 0.015625, the E4M3 values around it.
    The smallest is 2^-9; what is all zero gets 1.
    """
    largest = torch.tensor([2688.0, -9.0, 0.1, 1e-6, 0.0])
    groups = torch.zeros(5, 16).index_fill_(1, torch.tensor(3), 1.0) * largest[:, None]
    whole = nvfp4_global_scale(largest.max())
    assert whole.item() == 1
    assert nvfp4_scale(groups, whole).float()[:, 0].tolist() == [448, 1.5, 0.017578125, 2.0**-9, 1]
    of_two = nvfp4_global_scale(torch.tensor([0.0, 3.0]).bfloat16())
    assert of_two.tolist() == [1, torch.tensor(3 / 2688).item()]


def test_mxfp4_scale_by_hand() -> None:
    """Four times the scale is the power of two below absmax, from mantissa 1.75 on the one above.

    At the top 1.75 * 2^127 rounds to infinity: the largest scale, 2^127, as Quark 0.13 has it.
    """
    absmax = torch.tensor([[1.0], [1.74], [1.75], [6], [7], [1.7 * 2.0**127], [1.75 * 2.0**127]])
    assert mxfp4_scale(absmax).log2().flatten().tolist() == [-2, -2, -1, 0, 1, 125, 127]
    assert mxfp4_scale(torch.zeros(1, 32)).item() == 2.0**-127


# ---- the search of scales, against an exhaustive one

ABSMAX = Algorithm(scale="absmax", rounding="nearest")
MSE = Algorithm(scale="mse", rounding="nearest")
INT4_F16 = WeightFormat(
    dtype="int4", granularity="group", symmetric=True, group_size=32, scale_dtype="float16"
)
SEARCHED = {
    "int4": INT4, "int4-groups": INT4_GROUPS, "int4-f16": INT4_F16, "fp8": FP8_CHANNEL,
    "nvfp4": NVFP4, "mxfp4": MXFP4,
}  # fmt: skip


def some_weight(rows: int = 24, columns: int = 96, seed: int = 0) -> Tensor:
    return gaussian(rows, columns, seed).bfloat16()


def searched(algorithm: Algorithm, weights: WeightFormat, w: torch.Tensor) -> QuantizedWeight:
    return get_backend("torch", algorithm).quantize(w, weights)


@pytest.mark.parametrize("weights", SEARCHED.values(), ids=SEARCHED)
def test_no_group_is_worse_than_under_absmax_and_the_sum_is_better(weights: WeightFormat) -> None:
    w = some_weight()
    w[3] = 0
    size = weights.group_size or w.shape[1]
    found = [searched(a, weights, w) for a in (ABSMAX, MSE)]
    assert torch.equal(found[0].scale[3].float(), found[1].scale[3].float())
    squares = ((one.dequantized() - w.float()).double().square() for one in found)
    absmax, mse = (each.reshape(-1, size).sum(1) for each in squares)
    assert (mse <= absmax * (1 + 1e-6)).all()
    # MXFP4 has no better one, and FP8's steps grow with the weights.
    share = {"mxfp4": 1.0, "fp8_e4m3": 0.98, "nvfp4": 0.85}.get(weights.dtype, 0.91)
    assert mse.sum() <= share * absmax.sum()


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_integer_scale_is_the_best_of_all_candidates(dtype: type) -> None:
    """All 28 candidates of each row, in numpy, as the recipe's documentation states them."""
    w = some_weight(16, 64, seed=3).to(torch.float16 if dtype is np.float16 else torch.float32)
    found = searched(MSE, INT4, w)
    for row, scale in zip(w.numpy().astype(np.float32), found.scale.numpy()[:, 0], strict=True):
        absmax = dtype(dtype(np.abs(row).max()) / dtype(7.5))
        shares = [i / 32 for i in range(8, 35)] + [15 / 14]
        tried = [dtype(np.float32(absmax) * np.float32(share)) for share in shares]
        lost = []
        for s in tried:
            codes = np.clip(np.rint(row * (np.float32(1) / np.float32(s))), -8, 7)
            lost.append(((row - codes * np.float32(s)).astype(np.float64) ** 2).sum())
        assert scale in tried
        assert lost[tried.index(scale)] == pytest.approx(min(lost), rel=1e-5)


def importance(columns: int) -> InputMoments:
    """Inputs of which some are a hundred times as large as others."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(9))
    spread = torch.logspace(-2, 2, columns)[order]
    return InputMoments(torch.diag(spread), torch.device("cpu"), precise=False, name="test")


def test_rows_that_are_searched_some_at_a_time_weigh_their_own_inputs() -> None:
    """Six groups in a row: 4,096 groups, which are searched at a time, end within one."""
    w, moments = some_weight(700, 96, seed=6), importance(96)
    absmax, algorithm = w.abs().amax().float().reshape(1, 1), row_algorithm(MSE)
    given = {"absmax": absmax, "moments": moments}
    whole, *parts = (algorithm.quantize(rows, NVFP4, **given) for rows in (w, w[:350], w[350:]))
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts]))


@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "by-inputs"])
def test_no_nvfp4_scale_that_can_be_stored_is_better(weighted: bool) -> None:
    """Of all 126 positive numbers of FP8_CHANNEL those from 1 to 1.5 of the absmax scale."""
    w = some_weight(8, 64, seed=5)
    w[0, :16] = 2.0**-20  # the smallest scale there is
    w[7, -1] = 2688 * 2.0**-9  # so that the matrix has the scale 2**-9
    # Under 1.302, which rounds to 1.25: the last number to try, six further, is 2, and is best.
    w[1, :16] = torch.tensor([7.8125, *[1.0, 2.0, 3.0, 4.0, 6.0] * 3]).bfloat16() * 2.0**-9
    moments = importance(64) if weighted else None
    found = row_algorithm(MSE).quantize(w, NVFP4, absmax=None, moments=moments)
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
    w = some_weight()
    w[:, ::16] *= 100
    absmax, mse = searched(ABSMAX, weights, w), searched(MSE, weights, w)
    assert (mse.scale.float() >= absmax.scale.float()).all()
    if weights is MXFP4:
        assert torch.equal(mse.codes, absmax.codes)
