"""Published drafts by their headers alone: families, parameter counts, byte budgets, wrong configs.

Files are sparse: real headers, no data. Shapes come from `scripts.dev.real_shapes.drafts`, where
they are written by hand; what the families expect follows from config.json.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import built_in_recipes, load_recipe
from draftquant.scripts.dev.real_shapes.drafts import REAL_DRAFTS
from draftquant.scripts.dev.real_shapes.generate import write_sparse_model


class Published(NamedTuple):
    """Totals of a draft, and of those of its linears that recipes quantize."""

    family: str
    tensors: int
    parameters: int
    nbytes: int
    linears: int
    weights: int
    rows: int


# Rows are output channels, each with one scale per channel:
# Llama: q, k, v; o; gate, up; down.
LLAMA_ROWS = 3 * 8192 + 7168 + 2 * 12288 + 7168
# MLA: q_a, q_b, kv_a, o, gate, up, down. kv_b stays: 16384 x 512 of the 512,622,592 weights.
MLA_ROWS = 1536 + 12288 + 576 + 7168 + 2 * 18432 + 7168
MLA_WEIGHTS = 512_622_592 - 16384 * 512
# DFlash, five layers: q, k, v, o; gate, up; down.
DFLASH_ROWS = 5 * (4 * 2304 + 2 * 9216 + 2304)

PUBLISHED = {
    "kimi-k2.5-eagle3": Published(
        "eagle3-llama", 14, 3_178_262_528, 6_356_525_056, 7, 675_282_944, LLAMA_ROWS
    ),
    "kimi-k2.5-eagle3-mla": Published(
        "eagle3-mla", 17, 3_015_604_224, 6_031_208_448, 7, MLA_WEIGHTS, MLA_ROWS
    ),
    "kimi-k2.6-eagle3-mla": Published(
        "eagle3-mla", 17, 3_015_604_224, 6_031_208_448, 7, MLA_WEIGHTS, MLA_ROWS
    ),
    "nvidia-kimi-k2.6-eagle3": Published(
        "eagle3-mla", 16, 1_841_199_104, 3_682_398_208, 7, MLA_WEIGHTS, MLA_ROWS
    ),
    "kimi-linear-dflash": Published(
        "dflash", 58, 451_243_728, 902_487_456, 35, 5 * 84_934_656, DFLASH_ROWS
    ),
}
RECIPES = (
    "mi325x-w4a8", "int4-channel", "fp8-ptpc", "blackwell-fp8",
    "int4-group128", "mi325x-int4-awq", "blackwell-nvfp4", "mi355-mxfp4", "nvfp4-weights",
)  # fmt: skip
SAME_BYTES = {
    "mi325x-fp8": "fp8-ptpc",
    "mi325x-w4a8-fp8": "fp8-ptpc",  # its codes are carried
    "blackwell-fp8-mla": "fp8-ptpc",
    "blackwell-nvfp4-learned": "blackwell-nvfp4",
    "int4-channel-gptq": "int4-channel",
    "int4-group128-gptq": "int4-group128",
    "mi325x-int4-awq-gptq": "mi325x-int4-awq",
    "mi325x-w4a8-gptq": "mi325x-w4a8",
    "mi355-mxfp4-learned": "mi355-mxfp4",
    "mxfp4-weights": "mi355-mxfp4",
    "mxfp4-weights-gptq": "mi355-mxfp4",
    "nvfp4-weights-gptq": "nvfp4-weights",
}
"""Formats of weights that differ in the layout's names or the values alone."""
HEADS = {
    "fp8-ptpc-head": ("fp8-ptpc", 8, {"weight_scale": 4 * 163_840}),
    "int4-group128-gptq-head": ("int4-group128", 8, {"weight_scale": 4 * 163_840}),
    "int4-channel-gptq-head": (
        "int4-channel",
        4,
        {"weight_scale": 2 * 163_840, "weight_shape": 2 * 8},
    ),
}
"""What is done to the layers, bits of the head's weights, bytes beside them: a row has a scale."""
LAYERS_ALONE = tuple(name for name in built_in_recipes() if name not in HEADS)


def overhead_by_hand(recipe: str, linears: int, weights: int, rows: int) -> dict[str, int]:
    """Bytes beside the codes: scales are BF16 or F16 with INT4, F32 with FP8, a byte with FP4.

    All inputs are whole groups of 128, so that a matrix has weights / group size scales.
    """
    return {
        "int4-group128": {"weight_scale": 2 * weights // 128, "weight_shape": linears * 2 * 8},
        "mi325x-int4-awq": {"scales": 2 * weights // 128, "qzeros": 4 * weights // 128 // 8},
        "blackwell-nvfp4": {
            "weight_scale": weights // 16,
            "weight_scale_2": linears * 4,
            "input_scale": linears * 4,
        },
        "mi355-mxfp4": {"weight_scale": weights // 32},
        "nvfp4-weights": {"weight_scale": weights // 16, "weight_global_scale": linears * 4},
        "mi325x-w4a8": {"weight_scale": 2 * rows, "weight_zero_point": 4 * rows // 8},
        "int4-channel": {"weight_scale": 2 * rows, "weight_shape": linears * 2 * 8},
        "fp8-ptpc": {"weight_scale": 4 * rows},
        "blackwell-fp8": {"weight_scale": linears * 4, "input_scale": linears * 4},
    }[recipe]


def write_headers(folder: Path, name: str, *, divide: int = 1, **changes: Any) -> Checkpoint:
    """A draft without data; `changes` go into its config.json after its shapes are made."""
    config = REAL_DRAFTS[name].config(divide)
    shapes = REAL_DRAFTS[name].shapes(config)
    for key, value in changes.items():
        section = config["dflash_config"] if key == "target_layer_ids" else config
        section[key] = value
    return write_sparse_model(folder, config, shapes)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draft]:
    folder = tmp_path_factory.mktemp("published")
    return {name: read_draft(write_headers(folder / name, name)) for name in REAL_DRAFTS}


def test_every_published_draft_and_every_recipe_has_its_totals() -> None:
    assert PUBLISHED.keys() == REAL_DRAFTS.keys()
    assert sorted((*RECIPES, *SAME_BYTES, *HEADS)) == sorted(built_in_recipes())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_size_is_that_of_the_published_draft(drafts: dict[str, Draft], name: str) -> None:
    draft, published = drafts[name], PUBLISHED[name]
    assert draft.family.name == published.family
    assert len(draft.rows) == published.tensors
    assert sum(row.tensor.numel for row in draft.rows) == published.parameters
    assert draft.checkpoint.nbytes == published.nbytes == 2 * published.parameters


@pytest.mark.each_value
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("recipe", LAYERS_ALONE)
def test_the_byte_budget_of_every_recipe(drafts: dict[str, Draft], name: str, recipe: str) -> None:
    published, plan = PUBLISHED[name], make_plan(load_recipe(recipe), drafts[name])
    counted = SAME_BYTES.get(recipe, recipe)
    overhead = overhead_by_hand(counted, published.linears, published.weights, published.rows)
    bits = 8 if counted in ("fp8-ptpc", "blackwell-fp8") else 4
    kept = 2 * (published.parameters - published.weights)
    assert plan.bytes_before == published.nbytes
    assert len(plan.quantized) == published.linears
    assert plan.overhead() == overhead
    assert plan.bytes_after == kept + published.weights * bits // 8 + sum(overhead.values())
