"""A draft's keys and values in an FP8 cache: what is rounded, how, and what a draft sees of it."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from draftquant.quantize.drafts.draft_cache import (
    UNIT,
    CacheRounding,
    CacheScales,
    as_kept,
    cached_layers,
)
from draftquant.recipes.errors import CheckpointError
from test_passes import DRAFTS, ROWS, Case, all_hidden, case_of
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "engines"))

import kv_cache

RECORDED = json.loads(kv_cache.RESULTS.read_text(encoding="utf-8"))
pytestmark = pytest.mark.usefixtures("float64_on_one_thread")
case = pytest.fixture(params=DRAFTS)(lambda request: case_of(request.param))


# ---- one number


KEPT = {
    0.1: 0.1015625, 17.0: 16.0, 19.0: 20.0,  # a tie goes to the even mantissa
    2.0**-9: 2.0**-9, 2.0**-10: 0.0, 1.5 * 2.0**-10: 2.0**-9,  # the smallest above zero
    464.0: 448.0, 465.0: 448.0, -1e4: -448.0,
}  # fmt: skip


def test_a_number_is_kept_as_e4m3_times_its_scale() -> None:
    for scale in (1.0, 0.25, 2.0**9):
        given = torch.tensor([x * scale for x in KEPT])
        found = as_kept(given, torch.tensor(scale))
        assert found.tolist() == [kept * scale for kept in KEPT.values()]


@pytest.mark.parametrize("scale", kv_cache.SCALES)
def test_sglang_keeps_what_replay_says(scale: float) -> None:
    """Its own code on a CPU; under scales that are no powers of two it rounds to BF16 first."""
    given, codes = kv_cache.numbers(), torch.tensor(RECORDED[str(scale)]["sglang"])
    kept = codes.to(torch.uint8).view(torch.float8_e4m3fn).float() + 0.0  # zeros have no sign
    quotients = (given.float() / torch.tensor(scale)).to(torch.bfloat16).float()
    assert torch.equal(kept, as_kept(quotients, torch.tensor(1.0)) + 0.0)
    other = kept != as_kept(given.float(), torch.tensor(scale)) / scale + 0.0
    power_of_two = torch.frexp(torch.tensor(scale))[0] == 0.5
    assert other.double().mean() < (0.06 if not power_of_two else 1e-9)


def test_a_scale_may_be_that_of_a_head() -> None:
    keys = torch.full((1, 2, 3, 4), 600.0)
    scales = {5: CacheScales(k=(1.0, 2.0), v=(4.0,))}
    k, v = CacheRounding(scales)(5, keys, keys)
    assert k[:, 0].unique().tolist() == [448.0]
    assert k[:, 1].unique().tolist() == [as_kept(torch.tensor(600.0), torch.tensor(2.0)).item()]
    assert v.unique().tolist() == [as_kept(torch.tensor(600.0), torch.tensor(4.0)).item()]
    alone, _ = CacheRounding(scales)(0, keys, keys)
    assert alone is keys  # of another layer


def test_gradients_go_straight_through() -> None:
    keys = torch.randn(1, 2, 3, 4).requires_grad_()
    k, v = CacheRounding({0: UNIT})(0, keys, keys)
    (2 * k.sum() + v.sum()).backward()
    assert keys.grad is not None
    assert keys.grad.unique().tolist() == [3.0]


# ---- a draft


def test_a_cache_that_changes_nothing_changes_no_bit(case: Case) -> None:
    plain, same, rounded = (
        all_hidden(forward, case, ROWS["strided"], 4)
        for forward in (
            case.forward(),
            case.forward().caching(lambda _layer, keys, values: (keys, values)),
            case.forward().caching(CacheRounding({0: UNIT, 1: UNIT})),
        )
    )
    assert torch.equal(same, plain)
    assert not torch.equal(rounded, plain)


def test_every_key_and_value_goes_through_the_cache(case: Case) -> None:
    """Of the context, of deeper steps and of a block's own slots; MLA keeps one entry a token."""
    seen: list[tuple[int, torch.Size, torch.Size]] = []

    def watch(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((layer, keys.shape[1:], values.shape[1:]))
        return torch.zeros_like(keys), torch.zeros_like(values)

    forward = case.forward().caching(watch)
    found = all_hidden(forward, case, ROWS["strided"], 4)
    assert {layer for layer, _, _ in seen} == {0, 1} == set(cached_layers(case.weights, "draft"))
    latent = case.family.name == "eagle3-mla"
    heads, width, values = (1, 12, 0) if latent else (2, 8, 8)
    for _, k, v in seen:
        assert (k[0], k[2], v[0], v[2]) == (heads, width, heads, values)
    # What is read is what came back: with no value left, nothing of the tokens before is.
    tokens = case.token_ids.clone()
    tokens[:, : ROWS["strided"][0]] = (tokens[:, : ROWS["strided"][0]] + 1) % 40
    other = dataclasses.replace(case, token_ids=tokens)
    assert torch.equal(all_hidden(forward, other, ROWS["strided"], 4), found)
    assert not torch.equal(all_hidden(case.forward(), other, ROWS["strided"], 4), found)


def test_a_draft_without_attention_has_no_cache() -> None:
    with pytest.raises(CheckpointError, match="no layer of this draft has attention"):
        cached_layers(["layers.0.mlp.up_proj.weight", "lm_head.weight"], "toy")
