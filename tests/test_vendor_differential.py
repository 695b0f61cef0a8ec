"""Bit for bit: Quark 0.13 and ModelOpt 0.47, run for real, against our own numerics.

No tolerance anywhere. Each case is one weight; shapes are those of drafts (GQA k/v, MLA kv_a with
576 rows) and odd ones, values include what breaks quantizers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftquant.quantize.backends import get_backend
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import BackendName, WeightFormat
from torch import Tensor, nn
from vendors import needs
from weight_formats import FP8_CHANNEL, FP8_TENSOR, INT4, MXFP4, NVFP4, TWO_STAGES

INT4_GROUPS = [
    WeightFormat(dtype="int4", granularity="group", group_size=size, symmetric=True)
    for size in (32, 64, 128)
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
REORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def vendor_case(name: BackendName, weights: WeightFormat) -> Any:
    label = f"{name}-{weights.dtype}-{weights.granularity}{weights.group_size or ''}"
    label += "-of-fp8" if weights.first_stage else ""
    return pytest.param(name, weights, marks=[pytest.mark.vendor, needs(name)], id=label)


VENDOR_FORMATS = [
    vendor_case("quark", INT4),
    vendor_case("quark", FP8_TENSOR),
    vendor_case("quark", FP8_CHANNEL),
    vendor_case("modelopt", FP8_TENSOR),
    vendor_case("modelopt", FP8_CHANNEL),
    *(vendor_case("quark", weights) for weights in INT4_GROUPS),
    vendor_case("quark", TWO_STAGES),
    vendor_case("quark", MXFP4),
    vendor_case("modelopt", NVFP4),
]

SHAPES = {
    "q": (256, 512),
    "k or v, GQA": (32, 512),
    "gate or up": (576, 256),
    "down": (256, 576),
    "kv_a, MLA": (576, 64),
    "Nx8": (40, 8),
    "one row": (1, 64),
    "one column": (64, 1),
    "one value": (1, 1),
    "odd": (9, 5),
    "odd, long rows": (7, 1001),
}


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def with_row(row: Tensor) -> Tensor:
    """A Gaussian matrix whose row 3 is given."""
    weight = gaussian(8, row.numel())
    weight[3] = row
    return weight


def signs(columns: int) -> Tensor:
    return torch.tensor([1.0, -1.0]).repeat(columns // 2)


# Each builds in float32 for a dtype: what is subnormal or tiny depends on it.
EDGES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "all-zero row": lambda _: with_row(torch.zeros(16)),
    "all-zero matrix": lambda _: torch.zeros(8, 16),
    "negative zeros": lambda _: -torch.zeros(8, 16),
    "all-zero single row": lambda _: torch.zeros(1, 16),
    "tiny row": lambda _: with_row(gaussian(1, 16, seed=1)[0] * 1e-10),
    "tiny matrix": lambda _: gaussian(8, 16) * 1e-10,
    "subnormal row": lambda d: with_row(gaussian(1, 16)[0] * 40 * torch.finfo(d).smallest_normal),
    "subnormal matrix": lambda d: gaussian(8, 16) * 4 * torch.finfo(d).smallest_normal,
    "smallest subnormal": lambda d: signs(16).expand(8, 16) * smallest_subnormal(d),
    "a subnormal beside normal rows": lambda d: with_row(signs(16) * smallest_subnormal(d)),
    "ties of int4": lambda _: torch.cat([torch.arange(-7.5, 8.0), torch.zeros(8)]).expand(3, 24),
    "ties of fp8": lambda _: torch.tensor(
        [448.0, 17.0, 19.0, 21.0, -17.0, 2.0**-10, 3 * 2.0**-10, -5 * 2.0**-10, 0.53125, 432.0]
    ).expand(3, 10),
    "one huge outlier": lambda _: with_row(torch.tensor([6e4] + [1e-3] * 15)),
    "+absmax": lambda _: gaussian(8, 16).abs(),
    "-absmax": lambda _: -gaussian(8, 16).abs(),
    "+absmax and -absmax": lambda _: gaussian(8, 1) * signs(16),
    "constant": lambda _: torch.full((8, 16), 0.3),
    "near the largest number": lambda d: gaussian(8, 16).sign() * torch.finfo(d).max,
    "powers of two": lambda _: torch.exp2(-torch.arange(24.0)).expand(4, 24) * signs(24),
    "every half step": lambda _: torch.linspace(-1, 1, 897).reshape(1, -1).expand(4, 897),
}


def smallest_subnormal(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def same_bits(ours: QuantizedWeight, theirs: QuantizedWeight) -> bool:
    """Equal dtypes, shapes and bytes: -0.0 differs from 0.0, NaN equals itself."""
    pairs = [(ours.codes, theirs.codes), (ours.scale, theirs.scale)]
    if ours.global_scale is not None and theirs.global_scale is not None:
        pairs.append((ours.global_scale, theirs.global_scale))
    alike = (ours.global_scale is None) == (theirs.global_scale is None)
    return (
        alike
        and ours.group_size == theirs.group_size
        and all(
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
            for a, b in pairs
        )
    )


def in_whole_groups(weight: Tensor, weights: WeightFormat) -> Tensor:
    """The weight, its columns repeated until they are whole groups (layouts refuse others)."""
    size = weights.group_size or 1
    columns = -(-weight.shape[1] // size) * size
    return weight.repeat(1, -(-columns // weight.shape[1]))[:, :columns].contiguous()


def assert_equal_to_torch(name: BackendName, weights: WeightFormat, weight: Tensor) -> None:
    source = weight.clone()
    theirs = get_backend(name).quantize(weight, weights)
    ours = get_backend("torch").quantize(source, weights)
    assert same_bits(ours, theirs)
    assert torch.equal(weight, source), "the toolkit wrote into the caller's weight"


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "weights"), VENDOR_FORMATS)
def test_gaussian_weight(
    name: BackendName, weights: WeightFormat, shape: str, dtype: torch.dtype
) -> None:
    rows, columns = SHAPES[shape]
    size = weights.group_size or 1
    assert_equal_to_torch(name, weights, gaussian(rows, -(-columns // size) * size).to(dtype))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("name", "weights"), VENDOR_FORMATS)
def test_edge_values(
    name: BackendName, weights: WeightFormat, edge: str, dtype: torch.dtype
) -> None:
    weight = in_whole_groups(EDGES[edge](dtype).to(dtype).contiguous(), weights)
    rows = weight.float().abs().amax(dim=1)
    least = rows.amin() if weights == FP8_CHANNEL else rows.amax()
    if name == "modelopt" and least < torch.finfo(torch.float32).tiny:
        with pytest.raises(BackendError, match=r"at least 2\^-126"):  # or NaN, or a scale too large
            get_backend(name).quantize(weight, weights)
        return
    assert_equal_to_torch(name, weights, weight)


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "weights"), VENDOR_FORMATS)
def test_weight_larger_than_one_block(name: BackendName, weights: WeightFormat) -> None:
    """Rounded in several blocks of rows; the last one is not full."""
    assert_equal_to_torch(name, weights, gaussian(2100, 8192).to(torch.bfloat16))


@pytest.mark.some(3)
@pytest.mark.parametrize(("name", "weights"), VENDOR_FORMATS)
def test_strided_view_of_a_larger_buffer(name: BackendName, weights: WeightFormat) -> None:
    buffer = gaussian(64, 256).to(torch.bfloat16)
    before = buffer.clone()
    assert_equal_to_torch(name, weights, buffer[8:40, ::2])
    assert torch.equal(buffer, before)


def packed_in_reorder(codes: Tensor) -> Tensor:
    """int4 codes [rows, 8 * words] -> int32 [rows, words]: nibble i holds column REORDER[i]."""
    columns = codes.shape[1]
    padded = nn.functional.pad(codes, (0, -columns % 8)).to(torch.int64) & 0xF
    nibbles = padded.reshape(codes.shape[0], -1, 8)[:, :, list(REORDER)]
    words = sum(nibbles[:, :, i] << (4 * i) for i in range(8))
    assert isinstance(words, Tensor)
    return words.to(torch.int32)


def exported_by_quark(weight: Tensor) -> Any:
    """Quark's whole default path: quantize, freeze (which rounds the weight), export module."""
    from quark.torch import ModelQuantizer
    from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
    from quark.torch.quantization.config.config import Int4PerChannelSpec, QConfig, QLayerConfig

    spec = Int4PerChannelSpec(
        symmetric=True, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False
    )
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    config = QConfig(global_quant_config=QLayerConfig(weight=spec.to_quantization_spec()))
    model = ModelQuantizer(config).quantize_model(nn.Sequential(linear), None)
    frozen = ModelQuantizer.freeze(model)[0]
    return QParamsLinear(frozen, custom_mode="quark", pack_method="reorder")


@pytest.mark.vendor
@needs("quark")
@pytest.mark.usefixtures("quark_imported")
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", ["q", "k or v, GQA", "gate or up", "down", "kv_a, MLA", "Nx8", "one column"]
)
def test_int4_words_of_quarks_own_export(shape: str, dtype: torch.dtype) -> None:
    weight = gaussian(*SHAPES[shape]).to(dtype)
    exported = exported_by_quark(weight)
    ours = get_backend("quark").quantize(weight, INT4)
    assert torch.equal(exported.weight, packed_in_reorder(ours.codes))
    assert torch.equal(exported.weight_quantizer.scale, ours.scale.flatten())
    assert not exported.weight_quantizer.zero_point.any()


def test_hand_written_packing() -> None:
    """Nibbles from low to high: columns 0, 2, 4, 6, 1, 3, 5, 7."""
    assert packed_in_reorder(torch.arange(8).reshape(1, 8)).item() == 0x75316420
    assert packed_in_reorder(torch.full((1, 8), -1)).item() == -1
    assert packed_in_reorder(torch.tensor([[-8]])).item() == 8
