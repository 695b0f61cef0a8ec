"""DFlash forward maths against an independent draft made of transformers' Qwen3 modules.

Tolerance: both sides compute in float64 throughout (`transformers_in_float64`). A logit is a chain
of about 20 dot products of at most 100 terms, some 1e4 roundings of 2^-53 = 1.1e-16 on values of
order 1 to 10, amplified by norms of rows of order 0.1: at most 1e4 * 1.1e-16 * 100 = 1e-10. A wrong
term (a dropped norm, an angle off by one position, one key too many) moves logits by more than
1e-4.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from asked_pairs import check_draft
from by_recipe import draft_of
from draftquant.quantize.drafts.families.dflash import DFlash, is_nemotron
from draftquant.quantize.drafts.passes import BlockForward
from draftquant.quantize.drafts.shared.block_layers import DFlashGeometry
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import CheckpointError
from reference_dflash import ReferenceDFlash, random_weights
from reference_draft import assert_close
from replay_proof import block_logits
from tiny import config_of, edit_json
from tiny_dflash import OWN_KEYS, tiny_dflash
from torch import Tensor

BLOCK_SIZE = 6
IDS = "eagle_aux_hidden_state_layer_ids"
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


WINDOWED = {"use_swa": True, "swa_window_size": 4}


def own(**keys: Any) -> dict[str, Any]:
    """The config's own section with more keys."""
    return {"dflash_config": CONFIG["dflash_config"] | keys}


CASES: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2},
    "pruned-vocabulary": {"draft_vocab_size": 24},
    "mixed-layers": {"layer_types": MIXED, "sliding_window": 7},
    "window-within-the-block": {"layer_types": SLIDING, "sliding_window": 3},
    "causal": own(causal=True),
    "is-causal": {"is_causal": True, **own(causal=False)},
    "sliding-both-ways": {"layer_types": MIXED, "sliding_window": 4, **own(causal=False)},
    "sinks": own(attention_sink_bias=True),
    "windows-over-full-layers": {"layer_types": ["full_attention"] * 3, **own(**WINDOWED)},
    "scaled-values": own(attention_value_scale=0.6),
    "nemotron": {
        "layer_types": SLIDING,
        "num_key_value_heads": 2,
        **own(causal=True, attention_sink_bias=True, **WINDOWED),
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


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.parametrize("case", CASES)
def test_block_equals_the_transformers_modules(case: str) -> None:
    geometry, weights, forward = build(case)
    reference = ReferenceDFlash(geometry, weights)
    features = features_of(geometry, 23)
    reference.extend(features[:, :9])
    reference.extend(features[:, 9:])  # the context grows as positions are verified
    for k in (1, BLOCK_SIZE - 1):
        expected = reference.propose(17, k)
        got = block_logits(forward, features, [17] + [0] * k)  # what is recorded is not read
        assert got.shape == (k, geometry.draft_vocab_size)
        assert_close(got, expected)
        assert_close(reference.propose(17, k), expected)  # nothing of the block is left


@pytest.mark.usefixtures("float64_on_one_thread")
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
        got = block_logits(forward, features, [anchor, 0, 0, 0])
        assert_close(got, reference.propose(anchor, 3))
        assert (got - block_logits(plain, features, [anchor, 0, 0, 0])).abs().max() > 1e-4


# ---- folders, with the side files that engines read


def target_tables(rows: int, hidden: int = 64) -> dict[str, Tensor]:
    """Embedding and head of a target with so many tokens."""
    table = torch.arange(rows * hidden, dtype=torch.float32).reshape(rows, hidden) / 1000
    return {"embed_tokens.weight": table, "lm_head.weight": -table}


def test_embedding_and_head_come_from_the_target(tmp_path: Path) -> None:
    plain_draft, tables = tiny_dflash(tmp_path / "draft", num_layers=2), target_tables(96)
    loaded = load_draft(plain_draft, shared=tables)
    assert all(torch.equal(loaded.weights[name], table) for name, table in tables.items())
    with pytest.raises(CheckpointError, match=r"the draft does not store embed_tokens.weight"):
        load_draft(plain_draft)
    with pytest.raises(CheckpointError, match=r"shape \[96, 64\], the target's is \[95, 64\]"):
        load_draft(plain_draft, shared=target_tables(95))


class NotPlain:
    """What `weights_only` refuses to unpickle."""


@pytest.mark.parametrize(
    "saved",
    [
        NotPlain(),
        b"no archive",
        [torch.zeros(64)],
        torch.zeros(7, 64),
        {"embedding": torch.zeros(64), "mask_token_id": 3},
        {"embedding": torch.zeros(64), "per_position": True},
        torch.full((64,), torch.nan),
    ],
    ids=range(7),
)
def test_mask_embeddings_that_engines_would_not_load(saved: object, tmp_path: Path) -> None:
    folder = tiny_dflash(tmp_path / "draft", num_layers=1)
    path = folder / "mask_embedding.pt"
    if isinstance(saved, bytes):
        path.write_bytes(saved)
    else:
        torch.save(saved, path)
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder, shared=target_tables(96))
    assert caught.value.where == str(path)


# ---- DFlash2


EXECUTED = Path(__file__).parents[1] / "experiments" / "engines" / "blocks.json"
DRAFTED = json.loads(EXECUTED.read_text(encoding="utf-8"))
"""What SGLang 0.5.23's own modules drafted behind each anchor, and the scores of its candidates."""
NUM_CONTEXT = 9
DFLASH2_CASES: dict[str, dict[str, Any]] = {
    "dflash2": {},
    "dflash2-scaled": {
        "output_multiplier": 0.5, "final_logit_softcapping": 3.0, "selector_top_k": 4,
    },
}  # fmt: skip


def in_speculators_layout(folder: Path) -> None:
    """Spell a DFlash2 draft's config.json as vLLM's `update_dflash2` reads it."""
    plain: dict[str, Any] = config_of(folder)
    nested = plain["dflash_config"]
    own = {key: value for key, value in nested.items() if key in OWN_KEYS["dflash2"]}
    layers = {key: plain[key] for key in plain if key not in ("architectures", "dflash_config")}
    config = {
        "architectures": ["DFlash2Speculator"], "speculators_model_type": "dflash2",
        "speculators_config": {
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": "owner/target"},
        },
        "aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        "mask_token_id": nested["mask_token_id"], "block_size": plain["block_size"],
        "sliding_window_non_causal": True,
        "transformer_layer_config": {
            "hidden_act": "silu", "max_position_embeddings": 512, **layers,
        },
        **own,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.usefixtures("one_thread")
def test_dflash2_of_speculators_is_the_same_as_its_plain_twin(tmp_path: Path) -> None:
    folder = tiny_dflash(tmp_path / "draft", kind="dflash2", num_layers=1)
    edit_json(folder / "config.json", is_causal=False)
    expected = draft_of(folder)
    in_speculators_layout(folder)
    found = draft_of(folder)
    assert found.family is expected.family
    assert found.geometry == expected.geometry
    answer = check_draft(folder, engine="vllm", arch="sm90", target_layers=8)
    assert answer.verdict == "LOADS"  # executed
    linears = {name.rpartition(".")[2] for name in answer.linears}
    assert {"kernel_projection", "hidden_projection"} <= linears
    edit_json(folder / "config.json", selector_rank=None)
    assert "KeyError: 'selector_rank'" in str(check_draft(folder, engine="vllm", arch="sm90").error)
    with pytest.raises(CheckpointError, match="selector_rank: missing key"):
        draft_of(folder)


def draft(folder: Path, case: str) -> Path:
    """The draft of a case, with an embedding and a head, which SGLang takes from the target."""
    made = {"num_layers": 2, "embed": True, "head": True, "dtype": "F32"}
    return tiny_dflash(folder, kind="dflash2", own=DFLASH2_CASES[case] or None, **made)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", DFLASH2_CASES)
def test_blocks_are_those_of_sglangs_own_modules(case: str, tmp_path: Path) -> None:
    """Each token, read behind those before it; the candidates and scores as well."""
    forward = load_draft(draft(tmp_path / "draft", case)).forward
    assert isinstance(forward, BlockForward)
    read = np.random.default_rng(1).standard_normal((1, NUM_CONTEXT, 3 * 64), dtype=np.float32)
    context = torch.from_numpy(read)  # of the target
    for anchor, found in DRAFTED[case].items():
        logits = block_logits(forward, context, [int(anchor), *found["tokens"]])
        assert logits.argmax(-1).tolist() == found["tokens"]
        for slot, scores in zip(logits, found["scores"], strict=True):
            offered = slot.isfinite().nonzero()[:, 0].tolist()
            assert sorted(map(int, scores)) == offered
            expected = torch.tensor([scores[str(token)] for token in offered])
            torch.testing.assert_close(slot[offered], expected, atol=2e-4, rtol=0)


@pytest.mark.usefixtures("one_thread")
def test_scores_of_dflash2_are_finite_and_those_of_its_candidates(tmp_path: Path) -> None:
    forward = load_draft(draft(tmp_path / "draft", "dflash2")).forward
    assert isinstance(forward, BlockForward)
    hidden = torch.randn(3, 64 + 24, generator=torch.manual_seed(0))
    scores, logits = forward.scores(hidden), forward.logits(hidden)
    assert bool(scores.isfinite().all())
    assert logits.isfinite().sum(-1).tolist() == [8, 8, 8]
    assert torch.equal(logits[logits.isfinite()], scores[logits.isfinite()])


def test_what_sglang_takes_for_a_draft_of_nemotron() -> None:
    """Each key decides, alone (`is_nemotron_35_draft_config`)."""
    section = {"target_layer_ids": [0, 2], "sample_from_anchor": False}
    config = {
        "architectures": ["DFlashDraftModel"], "has_embed_tokens": True, "dflash_config": section,
        "quantization_config": {"quant_algo": "W4A16_NVFP4"}, IDS: [1, 3],
    }  # fmt: skip
    others: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel"], "has_embed_tokens": False, "has_lm_head": True,
        "quantization_config": {"quant_algo": "NVFP4"}, IDS: [1, 4],
    }  # fmt: skip
    sections = ({"target_layer_ids": 2}, {"sample_from_anchor": 1})
    empty = {**config, "dflash_config": {**section, "target_layer_ids": []}, IDS: []}
    changed = [empty, *({**config, key: value} for key, value in others.items())]
    changed += [{**config, "dflash_config": {**section, **other}} for other in sections]
    assert is_nemotron(SimpleNamespace(config=config))  # type: ignore[arg-type]
    assert not any(is_nemotron(SimpleNamespace(config=c)) for c in changed)  # type: ignore[arg-type]
