"""Passes of chains and blocks: gradients against one row at a time, blocks of rows, FP8 caches.

The reference is the draft made of transformers' modules that checks the forward maths too, run as
an engine would, from every row anew. Tolerance: both sides are float64; a gradient sums some 1e3
products that each went forward and back through at most 60 dot products, and is compared relative
to the largest gradient of its tensor: 1e-9 leaves three orders to 1e-12, and a wrong term (a key
without its gradient, a row too many) moves it by more than 1e-4.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import reference_dflash
import torch
from draftquant.quantize.drafts import Family
from draftquant.quantize.drafts import passes as block
from draftquant.quantize.drafts import passes as chain
from draftquant.quantize.drafts.draft_cache import (
    UNIT,
    CacheRounding,
    CacheScales,
    as_kept,
    cached_layers,
)
from draftquant.quantize.drafts.families.dflash import DFlash
from draftquant.quantize.drafts.families.eagle3_llama import Eagle3Llama
from draftquant.quantize.drafts.families.eagle3_mla import Eagle3Mla
from draftquant.quantize.drafts.forward import DraftForward
from draftquant.quantize.stored.online_rounding import STATIC, InputRounding, kernel_scale
from reference_dflash import ReferenceDFlash
from reference_draft import ReferenceDraft, ReferenceMlaDraft, random_weights
from torch import Tensor
from transformers import DynamicCache

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

WIDTH, NUM_TOKENS, K = 16, 13, 3
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 40, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
MASK = 7
SLOTS = {
    "block_size": K + 1,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]},
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
}
DRAFTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": (Eagle3Llama(), SIZES | GROUPED),
    "llama-3.1": (
        Eagle3Llama(),
        SIZES | GROUPED | {"norm_output": True, "fc_norm": True, "draft_vocab_size": 24},
    ),
    "mla": (Eagle3Mla(), SIZES | LATENT),
    "dflash": (DFlash(), SIZES | GROUPED | SLOTS),
}
ROWS = {"all": range(2, 9), "strided": range(1, 9, 3), "one": range(8, 9)}

OnInput = Callable[[str, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A draft with random weights, and two sequences to run it on."""

    family: Family
    geometry: Any
    weights: dict[str, Tensor]
    features: Tensor
    token_ids: Tensor

    def forward(
        self, weights: Mapping[str, Tensor] | None = None, on_input: OnInput = lambda _, x: x
    ) -> DraftForward:
        return self.family.forward(self.geometry, weights or self.weights, on_input)

    def trainable(self) -> dict[str, Tensor]:
        return {
            name: weight.clone().requires_grad_(weight.is_floating_point())
            for name, weight in self.weights.items()
        }


@pytest.fixture(params=DRAFTS)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def case_of(name: str) -> Case:
    family, config = DRAFTS[name]
    geometry: Any = family.read_geometry(config, "config.json")
    if isinstance(family, DFlash):
        weights = reference_dflash.random_weights(geometry)
        generator = torch.Generator().manual_seed(3)
        weights["mask_embedding"] = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    else:
        weights = random_weights(geometry, family=family)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    return Case(
        family,
        geometry,
        weights,
        torch.randn((2, NUM_TOKENS - 1, 3 * WIDTH), generator=generator, dtype=torch.float64),
        torch.randint(40, (2, NUM_TOKENS), generator=generator),
    )


def all_hidden(forward: DraftForward, case: Case, rows: range, block_rows: int) -> Tensor:
    """[B, R, K, W] of all passes, each row and depth exactly once."""
    filled = torch.zeros(len(rows), K)
    hidden = [[torch.empty(0)] * K for _ in rows]
    fused, how = forward.fuse(case.features), {"num_draft_tokens": K, "block_rows": block_rows}
    for one in forward.passes(fused, case.token_ids, rows=rows, **how):
        assert one.hidden.shape == (2, len(one.rows), len(one.depths), WIDTH)
        for (i, row), (j, depth) in itertools.product(enumerate(one.rows), enumerate(one.depths)):
            filled[rows.index(row), depth] += 1
            hidden[rows.index(row)][depth] = one.hidden[:, i, j]
    assert torch.equal(filled, torch.ones(len(rows), K))
    return torch.stack([torch.stack(of_row, dim=1) for of_row in hidden], dim=1)


def row_by_row(case: Case, rows: range, reference: Any, features: Tensor) -> Tensor:
    """Logits [B, R, K, draft vocabulary] of a draft that starts each row with an empty cache."""
    every = []
    for sequence, row in itertools.product(range(2), rows):
        reference.cache = DynamicCache()
        tokens, seen = case.token_ids[sequence], features[sequence, None, : row + 1]
        if isinstance(reference, ReferenceDFlash):
            reference.extend(seen)
            every.append(reference.propose(int(tokens[row + 1]), K))
            continue
        logits, fed = reference.extend(tokens[None, 1 : row + 2], reference.fuse(seen), 0)
        steps = [logits[0, -1]]
        for position in range(row + 1, row + K):
            logits, fed = reference.extend(tokens[None, None, position + 1], fed[:, -1:], position)
            steps.append(logits[0, -1])
        every.append(torch.stack(steps))
    return torch.stack(every).unflatten(0, (2, len(rows)))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("rows", "block_rows", "max_scores"),
    [("all", 4, 1), ("strided", 4, 2**24), ("one", 256, 2**24)],
)
def test_logits_and_gradients_are_those_of_one_row_at_a_time(
    case: Case, rows: str, block_rows: int, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block of rows or several, and attention in one piece or query by query."""
    for module in (chain, block):
        monkeypatch.setattr(module, "MAX_SCORES", max_scores)
    weights = case.trainable()
    features = case.features.clone().requires_grad_()
    forward = case.forward(weights)
    ours = dataclasses.replace(case, features=features)
    logits = forward.logits(all_hidden(forward, ours, ROWS[rows], block_rows))

    kinds = {"dflash": ReferenceDFlash, "eagle3-mla": ReferenceMlaDraft}
    kind: Any = kinds.get(case.family.name, ReferenceDraft)
    reference = kind(case.geometry, case.weights).requires_grad_(True)
    their_features = case.features.clone().requires_grad_()
    expected = row_by_row(case, ROWS[rows], reference, their_features)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)

    generator = torch.Generator().manual_seed(6)
    towards = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    torch.autograd.backward((logits * towards).sum())
    torch.autograd.backward((expected * towards).sum())
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    if "mask_embedding" in weights:  # the reference has it as a row of the table
        mask_row = theirs["embed_tokens.weight"][MASK].clone()
        theirs["embed_tokens.weight"][MASK] = 0
        theirs["mask_embedding"] = mask_row
    trained = {name: weight.grad for name, weight in weights.items() if weight.requires_grad}
    assert trained.keys() == theirs.keys()
    for name, gradient in {**theirs, "features": their_features.grad}.items():
        own = features.grad if name == "features" else trained[name]
        assert own is not None, name
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(
            own / gradient.abs().max(), gradient / gradient.abs().max(), rtol=0, atol=1e-9, msg=name
        )


def test_a_window_counts_the_row_itself() -> None:
    attention, nothing = chain.ChainAttention(6, window=2), torch.zeros(1, 1, 6, 4).bfloat16()
    attention.begin(range(6), 0)
    mixed = attention(0, nothing, nothing, torch.eye(6)[None, None].bfloat16(), 1.0)[0, 0]
    assert torch.equal(mixed > 0, torch.ones(6, 6).tril().triu(-1) > 0)
    assert mixed.dtype == torch.bfloat16  # which o_proj multiplies


# ---- activations


def rounding(activations: Any, case: Case) -> InputRounding:
    linears = [name.removesuffix(".weight") for name in case.weights if "_proj" in name]
    scale = kernel_scale(activations, torch.tensor(0.01))
    scales = dict.fromkeys(linears, scale) if activations in STATIC else {}
    return InputRounding(dict.fromkeys(linears, activations), scales, None)


# ---- keys and values in an FP8 cache: what is rounded, and what a draft sees of it


CACHE = Path(__file__).parents[1] / "experiments" / "engines" / "kv_cache.json"
RECORDED = json.loads(CACHE.read_text(encoding="utf-8"))


def numbers() -> Tensor:
    """BF16 numbers of every kind: ties, subnormal ones, those beyond the range. No random ones."""
    steps = ((torch.arange(384) * 7919) % 1009 - 504).float()
    some = [
        steps / 60,
        steps * 1.5,
        steps * 2.0**-17,
        torch.tensor([0.0, 17.0, 19.0, 448.0, 464.0, 465.0, 480.0, 1e4, -1e4, 2**-9, 2**-10]),
        torch.tensor([1.5 * 2**-10, 2.5 * 2**-9, 3.5 * 2**-9, -(2**-6), 1.0625, 1.1875, -240.0]),
    ]
    return torch.cat(some).to(torch.bfloat16)


KEPT = {
    0.1: 0.1015625, 17.0: 16.0, 19.0: 20.0,  # a tie goes to the even mantissa
    2.0**-9: 2.0**-9, 2.0**-10: 0.0, 1.5 * 2.0**-10: 2.0**-9,  # the smallest above zero
    464.0: 448.0, 465.0: 448.0, -1e4: -448.0,
}  # fmt: skip


def test_a_number_is_kept_as_e4m3_times_its_scale() -> None:
    for scale in (1.0, 0.25, 2.0**9):
        found = as_kept(torch.tensor([x * scale for x in KEPT]), torch.tensor(scale))
        assert found.tolist() == [kept * scale for kept in KEPT.values()]


@pytest.mark.parametrize("scale", [*map(float, RECORDED)])
def test_sglang_keeps_what_replay_says(scale: float) -> None:
    """Its own code on a CPU; under scales that are no powers of two it rounds to BF16 first."""
    given, codes = numbers(), torch.tensor(RECORDED[str(scale)]["sglang"])
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


def test_a_cache_that_changes_nothing_changes_no_bit(case: Case) -> None:
    unchanged = case.forward().caching(lambda _layer, keys, values: (keys, values))
    forwards = case.forward(), unchanged, case.forward().caching(CacheRounding({0: UNIT, 1: UNIT}))
    plain, same, rounded = (all_hidden(one, case, ROWS["strided"], 4) for one in forwards)
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
    heads, width, values = (1, 12, 0) if case.family.name == "eagle3-mla" else (2, 8, 8)
    for _, k, v in seen:
        assert (k[0], k[2], v[0], v[2]) == (heads, width, heads, values)
    # What is read is what came back: with no value left, nothing of the tokens before is.
    tokens = case.token_ids.clone()
    tokens[:, : ROWS["strided"][0]] = (tokens[:, : ROWS["strided"][0]] + 1) % 40
    features = case.features.clone()
    features[:, : ROWS["strided"][0]] += 1
    other = dataclasses.replace(case, token_ids=tokens, features=features)
    assert torch.equal(all_hidden(forward, other, ROWS["strided"], 4), found)
    assert not torch.equal(all_hidden(case.forward(), other, ROWS["strided"], 4), found)
