"""P-EAGLE: the layout of speculators, and one pass against the plain loop of the engine."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.engines.versions import choose
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from proposing import draft_proposals
from reference_draft import ReferenceDraft
from tiny import edit_json, tiny_eagle3_llama
from tiny_llama import with_mask_hidden

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

K, MASK = 4, 7


def peagle(folder: Path) -> Path:
    return with_mask_hidden(tiny_eagle3_llama(folder, prefix="layers.0.", num_layers=2))


def test_the_layout_of_speculators_says_the_same(tmp_path: Path) -> None:
    folder = peagle(tmp_path / "draft")
    layer = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "vocab_size": 96, "model_type": "llama", "hidden_act": "silu",
    }  # fmt: skip
    edit_json(
        folder / "config.json",
        architectures=["PEagleDraftModel"],
        model_type=None,
        speculators_model_type="peagle",
        transformer_layer_config=layer,
        eagle_config=None,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
    )
    geometry = read_draft(Checkpoint.open(folder)).geometry
    assert isinstance(geometry, Eagle3Geometry)
    assert geometry.parallel
    assert geometry.mask_token_id == MASK
    assert not geometry.norm_before_residual  # which is true for its EAGLE-3
    assert geometry.aux_layer_ids == (1, 3, 4)
    config = {**Checkpoint.open(folder).config, "mask_token_id": MASK, "speculators_config": {}}
    served = choose("vllm").plain_config(config)
    assert isinstance(served, Mapping)
    assert served["norm_before_residual"] is False


def test_all_tokens_of_a_round_are_those_of_the_engines_pass(tmp_path: Path) -> None:
    """Every round anew: the rows of the committed tokens, then K - 1 masks, through one cache."""
    draft = load_draft(peagle(tmp_path / "draft"), dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 96, (20,), generator=generator)
    features = torch.randn(19, 192, dtype=torch.float64, generator=generator)
    hidden = draft.forward.fuse(features[None])[0]
    mask = draft.weights["fc.weight"] @ draft.weights["mask_hidden"][0, 0]
    found = draft_proposals(
        draft.forward, hidden, tokens, first_row=3, num_draft_tokens=K, block_rows=5
    ).token_ids
    for i, row in enumerate(range(3, 20 - 1 - K)):
        weights = {k: v for k, v in draft.weights.items() if k != "mask_hidden"}
        reference = ReferenceDraft(draft.geometry, weights)
        read = torch.cat((tokens[1 : row + 2], tokens.new_full((K - 1,), MASK)))
        states = torch.cat((hidden[: row + 1], mask.expand(K - 1, -1)))
        logits, _ = reference.extend(read[None], states[None], 0)
        assert found[i].tolist() == logits[0, -K:].argmax(-1).tolist()


def test_vllm_needs_a_mask_token(tmp_path: Path) -> None:
    folder = peagle(tmp_path / "draft")
    assert check_draft(folder, engine="vllm").verdict == "LOADS"
    edit_json(folder / "config.json", mask_token_id=None)
    said = check_draft(folder, engine="vllm").error or ""
    assert "For parallel drafting, the draft model config must have" in said
