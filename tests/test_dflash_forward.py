"""DFlash forward maths against an independent draft made of transformers' Qwen3 modules.

Tolerance: both sides compute in float64 throughout (`transformers_in_float64`). A logit is a chain
of about 20 dot products of at most 100 terms, some 1e4 roundings of 2^-53 = 1.1e-16 on values of
order 1 to 10, amplified by norms of rows of order 0.1: at most 1e4 * 1.1e-16 * 100 = 1e-10. A wrong
term (a dropped norm, an angle off by one position, one key too many) moves logits by more than
1e-4.
"""

from typing import Any

import pytest
import torch
from draftquant.quantize.drafts.families.dflash import DFlash
from draftquant.quantize.drafts.passes import BlockAttention, BlockForward
from draftquant.quantize.drafts.shared.block_layers import DFlashGeometry
from reference_dflash import ReferenceDFlash, random_weights
from reference_draft import assert_close
from torch import Tensor

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

BLOCK_SIZE = 6
CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,  # q is 64 wide, not hidden_size
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": BLOCK_SIZE,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 3, 5]},
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
SLIDING = ["sliding_attention"] * 3


def with_causal(causal: bool) -> dict[str, Any]:
    return {**CONFIG["dflash_config"], "causal": causal}


CASES: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2},
    "pruned-vocabulary": {"draft_vocab_size": 24},
    "mixed-layers": {"layer_types": MIXED, "sliding_window": 7},
    "window-within-the-block": {"layer_types": SLIDING, "sliding_window": 3},
    "causal": {"dflash_config": with_causal(True)},
    "is-causal": {"is_causal": True, "dflash_config": with_causal(False)},
    "sliding-both-ways": {
        "layer_types": MIXED,
        "sliding_window": 4,
        "dflash_config": with_causal(False),
    },
}


def build(case: str) -> tuple[DFlashGeometry, dict[str, Tensor], BlockForward]:
    geometry = DFlash().read_geometry(CONFIG | CASES[case], "config.json")
    weights = random_weights(geometry)
    return geometry, weights, DFlash().forward(geometry, weights, lambda _name, x: x)


def features_of(geometry: DFlashGeometry, count: int, seed: int = 1) -> Tensor:
    width = geometry.num_aux_layers * geometry.target_hidden_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, count, width), generator=generator, dtype=torch.float64)


def block_logits(
    forward: BlockForward, features: Tensor, anchor: int, num_draft_tokens: int
) -> Tensor:
    """One block behind all the features: [K, draft vocabulary]."""
    position = features.shape[1]
    attention = BlockAttention(forward, forward.fuse(features))
    attention.begin(range(position, position + 1))
    ids = torch.tensor([[anchor] + [0] * num_draft_tokens])  # what is recorded is not read
    block = forward.block(ids, torch.tensor([position]), attention)
    return forward.logits(block)[0]


@pytest.mark.parametrize("case", CASES)
def test_block_equals_the_transformers_modules(case: str) -> None:
    geometry, weights, forward = build(case)
    reference = ReferenceDFlash(geometry, weights)
    features = features_of(geometry, 23)
    reference.extend(features[:, :9])
    reference.extend(features[:, 9:])  # the context grows as positions are verified
    for k in (1, BLOCK_SIZE - 1):
        expected = reference.propose(17, k)
        got = block_logits(forward, features, 17, k)
        assert got.shape == (k, geometry.draft_vocab_size)
        assert_close(got, expected)
        assert_close(reference.propose(17, k), expected)  # nothing of the block is left


def test_a_trained_mask_embedding_stands_for_the_mask_token() -> None:
    """In the mask slots, and where the anchor happens to be that token."""
    geometry, weights, plain = build("mha")
    trained = torch.randn(32, dtype=torch.float64, generator=torch.manual_seed(4))
    weights = weights | {"mask_embedding": trained}
    forward = DFlash().forward(geometry, weights, lambda _name, x: x)
    reference = ReferenceDFlash(geometry, weights)
    features = features_of(geometry, 6)
    reference.extend(features)
    for anchor in (17, geometry.mask_token_id):
        got = block_logits(forward, features, anchor, 3)
        assert_close(got, reference.propose(anchor, 3))
        assert (got - block_logits(plain, features, anchor, 3)).abs().max() > 1e-4
