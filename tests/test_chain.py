"""The teacher-forced chain: all rows at once are the chains that an engine would run one by one."""

from collections.abc import Iterator

import pytest
import torch
from draftquant.quantize.drafts import passes as chain
from draftquant.quantize.drafts.families.eagle3_llama import Eagle3Llama
from proposing import draft_proposals
from reference_draft import ReferenceDraft, random_weights, transformers_in_float64


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with transformers_in_float64():
        yield


@pytest.mark.parametrize("block_rows", [1, 7, 256])
@pytest.mark.parametrize("max_scores", [1, 2**24])
def test_every_row_is_a_chain_of_its_own(
    block_rows: int, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers, grouped heads, random weights: all rows at once against a cached chain each."""
    monkeypatch.setattr(chain, "MAX_SCORES", max_scores)
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 60,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    geometry = Eagle3Llama().read_geometry(config, "config.json")
    weights = random_weights(geometry, seed=3)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(60, (24,), generator=generator)
    hidden = torch.randn((23, 32), generator=generator, dtype=torch.float64)
    num_draft_tokens, first_row = 4, 5
    predicted = draft_proposals(
        Eagle3Llama().forward(geometry, weights, lambda _name, x: x),
        hidden,
        token_ids,
        first_row=first_row,
        num_draft_tokens=num_draft_tokens,
        block_rows=block_rows,
    ).token_ids
    assert predicted.shape == (24 - 1 - num_draft_tokens - first_row, num_draft_tokens)
    for row in range(len(predicted)):
        reference = ReferenceDraft(geometry, weights)
        t = first_row + row
        logits, fed = reference.extend(token_ids[None, 1 : t + 2], hidden[None, : t + 1], 0)
        for depth in range(num_draft_tokens):
            assert int(predicted[row, depth]) == int(logits[0, -1].argmax())
            position = t + 1 + depth
            logits, fed = reference.extend(
                token_ids[None, None, position + 1], fed[:, -1:], position
            )
