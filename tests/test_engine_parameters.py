"""The rows of a head in one shard: filled up once, over all shards, and then split."""

import pytest
from draftquant.quantize.engines.built_linears import parameters, without_ones
from draftquant.quantize.engines.contract import Module


@pytest.mark.parametrize(
    ("rows", "tp", "expected"),
    [(96, 1, 128), (48, 2, 64), (70, 2, 96), (65, 4, 80), (64, 2, 64), (32000, 1, 32000)],
)
def test_the_padding_of_a_head_is_shared_by_its_shards(rows: int, tp: int, expected: int) -> None:
    """`rows` of a shard before padding: 70 * 2 = 140 become 192, and 96 of them are here."""
    head = Module(name="lm_head", prefix="lm_head", parts=("lm_head",), sharding="column")
    (weight,) = parameters(head, {"lm_head": {}}, [(rows, 8)], None, tp, biased=False)
    assert weight.shape == (expected, 8)


@pytest.mark.parametrize(
    ("shape", "expected"), [((4, 1), (4,)), ((1, 4), (1, 4)), ((1, 1), ()), ((), ()), ((4,), (4,))]
)
def test_ones_behind_a_shape_do_not_count(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """A row of four scales is no column of them."""
    assert without_ones(shape) == expected


def test_other_linears_are_not_filled_up() -> None:
    fc = Module(name="model.fc", prefix="model.fc", parts=("fc",), sharding="replicated")
    weight, bias = parameters(fc, {"fc": {}}, [(70, 8)], None, 2, biased=True)
    assert (weight.shape, bias.shape) == ((70, 8), (70,))
