"""Layouts: golden words and JSON, excludes as engines match them, compressed-tensors' own reader.

Quark and ModelOpt themselves are asked in test_vendors.py.
"""

import dataclasses
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from draftquant.quantize.files.safetensors_header import TensorInfo
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.layouts.layout import GatheredColumns
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight, int4_words, int8_words
from draftquant.recipes import ActivationFormat, Recipe, WeightFormat, load_recipe
from torch import Tensor
from weight_formats import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT4, PER_GROUP, PER_TOKEN, STATIC

KEPT = ("embed_tokens", "fc", "lm_head")


# Packing

COUNTING = [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("row", "interleaved", "unsigned", "words"),
    [
        (COUNTING, False, False, ["76543210"]),
        (COUNTING, True, False, ["75316420"]),  # columns 0 2 4 6 1 3 5 7, lowest nibble first
        (COUNTING, False, True, ["fedcba98"]),
        (COUNTING, True, True, ["fdb9eca8"]),
        ([7, -8] * 4, False, False, ["87878787"]),
        ([7, -8] * 4, True, False, ["88887777"]),
        ([1, 2, 3], True, False, ["00020031"]),
        ([1, 2, 3], False, True, ["88888ba9"]),  # padded with code 0
        ([*COUNTING, -1], False, False, ["76543210", "0000000f"]),
    ],
)
def test_golden_words(row: list[int], interleaved: bool, unsigned: bool, words: list[str]) -> None:
    codes = torch.tensor([row], dtype=torch.int8)
    packed = int4_words(codes, interleaved=interleaved, unsigned=unsigned)
    assert packed.dtype == torch.int32
    assert [f"{word & 0xFFFFFFFF:08x}" for word in packed[0].tolist()] == words
    assert len(packed) == 1


@pytest.mark.parametrize("columns", [7, 64, 1001])
def test_words_of_the_compressed_tensors_package(columns: int) -> None:
    wide = torch.randint(-128, 128, (37, columns), generator=torch.Generator().manual_seed(8))
    whole = columns // 4
    ours, theirs = int8_words(wide.to(torch.int8)), pack_to_int32(wide.to(torch.int8), 8)
    assert torch.equal(ours[:, :whole], theirs[:, :whole])
    random = torch.randint(-8, 8, (37, columns), generator=torch.Generator().manual_seed(columns))
    values = random.to(torch.int8)
    ours = int4_words(values, interleaved=False, unsigned=True)
    theirs = pack_to_int32(values, 4)
    if columns % 8 == 0:
        assert torch.equal(ours, theirs)
    else:  # padding is outside of weight_shape: only its nibbles may differ
        used = 4 * (columns % 8)
        assert torch.equal(ours[:, :-1], theirs[:, :-1])
        assert not ((ours ^ theirs)[:, -1] & ((1 << used) - 1)).any()


def ct_recipe(weights: WeightFormat, activations: ActivationFormat | None) -> Recipe:
    return dataclasses.replace(load_recipe("fp8-ptpc"), weights=weights, activations=activations)


CT_FORMATS = [
    (INT4, None),
    *((w, a) for w in (FP8_CHANNEL, FP8_TENSOR) for a in (PER_TOKEN, STATIC)),
    (FP8_BLOCK, PER_GROUP),
]


@pytest.mark.parametrize(("weights", "activations"), CT_FORMATS, ids=str)
def test_compressed_tensors_reads_our_json(
    weights: WeightFormat, activations: ActivationFormat | None
) -> None:
    declared = get_layout("compressed-tensors").declare(ct_recipe(weights, activations), KEPT)
    config = QuantizationConfig.model_validate(declared)
    again = config.model_dump(mode="json")
    assert contained(declared, again), (declared, again)
    assert isinstance(config.config_groups["group_0"], QuantizationScheme)
    assert QuantizationConfig.model_validate(again) == config


def contained(part: Any, whole: Any) -> bool:
    """True if every key and item of `part` stands in `whole` with the same value."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and contained(value, whole[key]) for key, value in part.items()
        )
    return bool(part == whole)


def encoded(layout: str, recipe: Recipe, block: QuantizedWeight) -> dict[str, Tensor]:
    """Everything that a weight is stored as, by local name; row blocks as in a run."""
    shape = tuple(block.codes.shape)
    weight = TensorInfo(name="m.weight", dtype="BF16", shape=shape, file="x", start=0, stop=0)
    chosen = get_layout(layout)  # type: ignore[arg-type]
    rows_of = chosen.encode_rows("m", block, recipe.weights)
    stored = {n: t.tensor if isinstance(t, GatheredColumns) else t for n, t in rows_of.items()}
    stored |= chosen.encode_whole(weight, block, recipe, None)
    expected = {t.name: t.shape for t in chosen.stored(weight, recipe)}
    sizes = {name: tensor.numel() for name, tensor in stored.items()}
    assert sizes == {name: torch.Size(shape).numel() for name, shape in expected.items()}
    return {name.removeprefix("m."): t.reshape(expected[name]) for name, t in stored.items()}


@pytest.mark.parametrize(
    ("weights", "inputs", "scales", "suffixes"),
    [
        (INT4, None, (172, 1), {"weight_packed", "weight_scale", "weight_shape"}),
        (FP8_CHANNEL, PER_TOKEN, (172, 1), {"weight", "weight_scale"}),
        (FP8_TENSOR, PER_TOKEN, (1, 1), {"weight", "weight_scale"}),
        # two blocks of rows, of which the second has 44, and three of inputs
        (FP8_BLOCK, PER_GROUP, (2, 3), {"weight", "weight_scale"}),
    ],
    ids=["int4 per channel", "fp8 per channel", "fp8 per tensor", "fp8 per block"],
)
def test_compressed_tensors_decompresses_what_we_store(
    weights: WeightFormat, inputs: Any, scales: tuple[int, int], suffixes: set[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(scales, generator=generator)
    values = (torch.randn(172, 384, generator=generator) * 100).to(torch.float8_e4m3fn)
    compressor: Any = FloatQuantizationCompressor
    if weights == INT4:
        compressor, scale = PackedQuantizationCompressor, scale.to(torch.bfloat16)
        values = torch.randint(-8, 8, (172, 67), generator=generator).to(torch.int8)
    block = QuantizedWeight(codes=values, scale=scale, group_size=weights.group_size)
    recipe = ct_recipe(weights, inputs)
    stored = encoded("compressed-tensors", recipe, block)
    assert stored.keys() == suffixes
    config = QuantizationConfig.model_validate(get_layout("compressed-tensors").declare(recipe, ()))
    found = compressor.decompress(stored, config.config_groups["group_0"])["weight"]
    assert torch.equal(found, block.dequantized().to(found.dtype))
