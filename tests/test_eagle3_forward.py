"""EAGLE-3 forward maths, of Llama and MLA, against an independent draft of transformers' modules.

Tolerance: both sides compute in float64 throughout (`transformers_in_float64`). A logit is a chain
of about 10 dot products of at most 200 terms, layers and chain steps included some 1e4 roundings of
2^-53 = 1.1e-16 on values of order 1 to 10, amplified by norms of rows of order 0.1: at most
1e4 * 1.1e-16 * 100 = 1e-10. A wrong term (a dropped norm, an angle off by one position) moves
logits by more than 1e-3. Of MLA the latents add two dot products and two norms, and yarn's m^2 (at
most 2) sharpens the softmax: within the same bound.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from asked_pairs import check_draft
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.families.eagle3_llama import Eagle3Llama
from draftquant.quantize.drafts.families.eagle3_mla import Eagle3Mla
from draftquant.quantize.drafts.recognition import plain_config
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from draftquant.quantize.engines.versions import ENGINES
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from proposing import draft_proposals
from reference_draft import (
    ReferenceDraft,
    ReferenceMlaDraft,
    add_norms,
    check_extend_and_chain,
    common_config,
    random_weights,
    widen,
)
from tiny import edit_json, tiny_eagle3_llama
from tiny_llama import with_mask_hidden
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

COMMON: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
COMMON |= {"num_attention_heads": 4, "vocab_size": 96, "rope_theta": 10000.0}
CONFIG = {**COMMON, "num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-6}
"""q is 64 wide, not hidden_size, as in the Kimi draft."""
RAMP = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
YARN = {"rope_type": "yarn", **RAMP}


CASES: dict[str, dict[str, Any]] = {
    "mha": {},
    "mqa": {"num_key_value_heads": 1},
    "yarn": {"rope_scaling": YARN},
    "yarn-attention-factor": {"rope_scaling": YARN | {"attention_factor": 1.3}},
    "yarn-two-mscales": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn-untruncated": {"rope_scaling": YARN | {"truncate": False}},
    # No pair turns even once within 4 (1) positions: the ramp is empty (reversed).
    "yarn-empty-ramp": {"rope_scaling": YARN | {"original_max_position_embeddings": 4}},
    "yarn-reversed-ramp": {"rope_scaling": YARN | {"original_max_position_embeddings": 1}},
    "yarn-clamped-ramp": {  # it would end behind the last dimension, at 18 of 15
        "rope_theta": 10.0,
        "rope_scaling": YARN | {"original_max_position_embeddings": 1000},
    },
    "norm-before-residual": {"norm_before_residual": True},
    "norm-before-fc": {"norm_before_fc": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True, "num_key_value_heads": 2},
    "pruned-vocabulary": {"draft_vocab_size": 24},
    "two-layers": {"num_hidden_layers": 2, "num_key_value_heads": 2},
}

MLA_CONFIG = {**COMMON, "q_lora_rank": 24, "kv_lora_rank": 20, "rms_norm_eps": 1e-5}
MLA_CONFIG |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}  # all differ
MLA_YARN = {"type": "yarn", **RAMP}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
KIMI = (
    MLA_YARN | MSCALE | {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0}
)
MLA_CASES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": MLA_YARN},  # no mscale_all_dim: cos and sin grow, the softmax does not
    "yarn-two-mscales": {"rope_scaling": MLA_YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "kimi-rope": {"rope_theta": 50000.0, "rope_scaling": KIMI},
    "rope-halves-yarn": {"rope_interleave": False, "rope_scaling": MLA_YARN | MSCALE},
    "wide-values": {"v_head_dim": 40},
    "three-layers": {"num_hidden_layers": 3, "rope_scaling": MLA_YARN | MSCALE},
    "eagle-3.1": {"fc_norm": True, "norm_output": True, "rope_scaling": KIMI},
    "pruned-vocabulary": {"draft_vocab_size": 24},
}
FAMILIES: dict[str, tuple[Any, type[ReferenceDraft], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "llama": (Eagle3Llama(), ReferenceDraft, CONFIG, CASES),
    "mla": (Eagle3Mla(), ReferenceMlaDraft, MLA_CONFIG, MLA_CASES),
}


def compare(family: Any, reference: type[ReferenceDraft], geometry: Eagle3Geometry) -> None:
    weights = random_weights(geometry, family=family)
    forward = family.forward(geometry, weights, lambda _name, x: x)
    check_extend_and_chain(geometry, forward, reference(geometry, weights))


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, (*_, cases) in FAMILIES.items() for case in cases]
)
def test_extend_and_chain_equal_the_transformers_modules(name: str, case: str) -> None:
    family, reference, config, cases = FAMILIES[name]
    compare(family, reference, family.read_geometry(config | cases[case], "config.json"))


class ReferenceQwen3Draft(ReferenceDraft):
    """See `ReferenceDraft`: attention and MLP are those of `transformers.models.qwen3`."""

    def make_config(self, g: Eagle3Geometry) -> Qwen3Config:  # type: ignore[override]
        return Qwen3Config(
            **common_config(g),
            num_key_value_heads=g.attention.num_key_value_heads,
            head_dim=g.attention.head_dim,
        )

    def make_layer(self, config: Any, index: int) -> nn.Module:
        layer = nn.Module()
        layer.self_attn = modeling_qwen3.Qwen3Attention(config, index)
        layer.mlp = modeling_qwen3.Qwen3MLP(config)
        add_norms(layer, config, index)
        if index == 0:
            widen(layer.self_attn, "q_proj", "k_proj", "v_proj")
        return layer


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_layers_of_speculators_equal_the_transformers_modules(layer_type: str) -> None:
    layers = {key: value for key, value in CONFIG.items() if key != "rope_theta"} | {
        "model_type": layer_type, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rope_parameters": YARN | {"rope_theta": 10000.0},
    }  # fmt: skip
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "transformer_layer_config": layers, "norm_before_residual": False,
    }  # fmt: skip
    family = Eagle3Llama()
    geometry = family.read_geometry(plain_config(config, "config.json"), "config.json")
    assert geometry.normed_heads == (layer_type == "qwen3")
    compare(family, {"llama": ReferenceDraft, "qwen3": ReferenceQwen3Draft}[layer_type], geometry)


# ---- p-EAGLE: the layout of speculators, and one pass against the plain loop of the engine


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
    assert (geometry.parallel, geometry.mask_token_id) == (True, MASK)
    assert geometry.norm_before_residual is False  # which is true for its EAGLE-3
    assert geometry.aux_layer_ids == (1, 3, 4)
    config = {**Checkpoint.open(folder).config, "mask_token_id": MASK, "speculators_config": {}}
    served: Any = ENGINES["vllm"].plain_config(config)
    assert served["norm_before_residual"] is False


def test_all_tokens_of_a_round_are_those_of_the_engines_pass(tmp_path: Path) -> None:
    """Every round anew: the rows of the committed tokens, then K - 1 masks, through one cache."""
    draft = load_draft(peagle(tmp_path / "draft"), dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 96, (20,), generator=generator)
    features = torch.randn(19, 192, dtype=torch.float64, generator=generator)
    hidden = draft.forward.fuse(features[None])[0]
    mask = draft.weights["fc.weight"] @ draft.weights["mask_hidden"][0, 0]
    rows = {"first_row": 3, "num_draft_tokens": K, "block_rows": 5}
    found = draft_proposals(draft.forward, hidden, tokens, **rows).token_ids
    weights = {k: v for k, v in draft.weights.items() if k != "mask_hidden"}
    for i, row in enumerate(range(3, 20 - 1 - K)):
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
