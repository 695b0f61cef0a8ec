"""Laguna's DFlash: its maths against an independent draft and vLLM's own class, and its way."""

import json
from pathlib import Path
from typing import Any

import laguna_draft
import pytest
import torch
from draftquant.quantize.drafts.families.laguna_dflash import FAMILY
from draftquant.quantize.drafts.passes import BlockAttention, BlockForward
from draftquant.quantize.stored.loading import load_draft
from k3_draft import CONTEXT, TOKENS, features
from reference_dflash import ReferenceLaguna, random_weights
from reference_draft import assert_close
from safetensors.torch import load_file
from torch import Tensor

K = 5
CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "draft_vocab_size": 96, "gating": "per-head", "sliding_window": 7,
    "layer_types": ["sliding_attention"] * 2,
    "dflash_config": {
        "block_size": K + 1, "mask_token_id": 95, "target_layer_ids": [1, 3, 5], "causal": True,
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "published": {},
    "gates-of-elements": {"gating": "per-element"},
    "no-gates": {"gating": False},
    "full-attention": {"layer_types": ["full_attention"] * 2, "gating": True},
}


def block_logits(forward: BlockForward, features: Tensor, anchor: int) -> Tensor:
    """One block behind all the features: [K, vocabulary]."""
    position = features.shape[1]
    attention = BlockAttention(forward, forward.fuse(features))
    attention.begin(range(position, position + 1))
    ids = torch.tensor([[anchor] + [0] * K])
    return forward.logits(forward.block(ids, torch.tensor([position]), attention))[0]


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.parametrize("case", CASES)
def test_block_equals_modules_with_parts_gates_and_norms_spelled_out(case: str) -> None:
    geometry = FAMILY.read_geometry(CONFIG | CASES[case], "config.json")
    weights = random_weights(geometry, family=FAMILY)
    forward: Any = FAMILY.forward(geometry, weights, lambda _name, x: x)
    reference = ReferenceLaguna(geometry, weights)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn((1, 17, 96), generator=generator, dtype=torch.float64)
    reference.extend(features[:, :9])
    reference.extend(features[:, 9:])
    assert_close(block_logits(forward, features, 17), reference.propose(17, K))


EXECUTED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "experiments/engines/laguna_maths.json").read_text("utf-8")
)


@pytest.mark.parametrize("case", laguna_draft.CASES)
def test_logits_are_those_of_vllms_own_class(case: str, tmp_path: Path) -> None:
    folder = laguna_draft.write_draft(tmp_path / "d", case)
    head = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    forward: Any = load_draft(folder, shared={"lm_head.weight": head}).forward
    attention = BlockAttention(forward, forward.fuse(features(3 * head.shape[1])[None]))
    attention.begin(range(CONTEXT, CONTEXT + 1))
    hidden = forward.block(torch.tensor([TOKENS]), torch.tensor([CONTEXT]), attention)
    expected = torch.tensor(EXECUTED[case])
    got = forward.logits(hidden)[0, :, : expected.shape[1]]
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
