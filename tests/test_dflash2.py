"""DFlash2: its config, its tensors, and that it drafts as SGLang's own modules do.

What it has in common with DFlash is in test_dflash_*.py.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.passes import BlockAttention, BlockForward
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import CheckpointError
from tiny import edit_json
from tiny_dflash import OWN_KEYS, tiny_dflash
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")

EXECUTED = Path(__file__).parents[1] / "experiments" / "engines" / "blocks.json"
DRAFTED = json.loads(EXECUTED.read_text(encoding="utf-8"))
"""What SGLang 0.5.23's own modules drafted behind each anchor, and the scores of its candidates."""
NUM_CONTEXT = 9
CASES: dict[str, dict[str, Any]] = {
    "dflash2": {},
    "dflash2-scaled": {
        "output_multiplier": 0.5, "final_logit_softcapping": 3.0, "selector_top_k": 4,
    },
}  # fmt: skip


def in_speculators_layout(folder: Path) -> None:
    """Spell a DFlash2 draft's config.json as vLLM's `update_dflash2` reads it."""
    plain: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
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


def test_dflash2_of_speculators_is_the_same_as_its_plain_twin(tmp_path: Path) -> None:
    folder = tiny_dflash(tmp_path / "draft", kind="dflash2", num_layers=1)
    edit_json(folder / "config.json", is_causal=False)
    expected = read_draft(Checkpoint.open(folder))
    in_speculators_layout(folder)
    found = read_draft(Checkpoint.open(folder))
    assert found.family is expected.family
    assert found.geometry == expected.geometry
    answer = check_draft(folder, engine="vllm", arch="sm90", target_layers=8)
    assert answer.verdict == "LOADS"  # executed
    linears = {layer.module.rpartition(".")[2] for layer in answer.layers}
    assert {"kernel_projection", "hidden_projection"} <= linears
    edit_json(folder / "config.json", selector_rank=None)
    assert "KeyError: 'selector_rank'" in str(check_draft(folder, engine="vllm", arch="sm90").error)
    with pytest.raises(CheckpointError, match="selector_rank: missing key"):
        read_draft(Checkpoint.open(folder))


def draft(folder: Path, case: str) -> Path:
    """The draft of a case, with an embedding and a head, which SGLang takes from the target."""
    made = {"num_layers": 2, "embed": True, "head": True, "dtype": "F32"}
    return tiny_dflash(folder, kind="dflash2", own=CASES[case] or None, **made)


def features() -> Any:
    """[NUM_CONTEXT, 3 * hidden], what the draft reads of the target."""
    return np.random.default_rng(1).standard_normal((NUM_CONTEXT, 3 * 64), dtype=np.float32)


def block(forward: BlockForward, token_ids: list[int]) -> Tensor:
    """Logits [K, vocabulary] of the block behind the context of `features`."""
    attention = BlockAttention(forward, forward.fuse(torch.from_numpy(features())[None]))
    attention.begin(range(NUM_CONTEXT, NUM_CONTEXT + 1))
    ids, position = torch.tensor([token_ids]), torch.tensor([NUM_CONTEXT])
    return forward.logits(forward.block(ids, position, attention))[0]


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_sglangs_own_modules(case: str, tmp_path: Path) -> None:
    """Each token, read behind those before it; the candidates and scores as well."""
    forward = load_draft(draft(tmp_path / "draft", case)).forward
    assert isinstance(forward, BlockForward)
    for anchor, found in DRAFTED[case].items():
        logits = block(forward, [int(anchor), *found["tokens"]])
        assert logits.argmax(-1).tolist() == found["tokens"]
        for slot, scores in zip(logits, found["scores"], strict=True):
            offered = slot.isfinite().nonzero()[:, 0].tolist()
            assert sorted(map(int, scores)) == offered
            expected = torch.tensor([scores[str(token)] for token in offered])
            assert_close(slot[offered], expected, atol=2e-4, rtol=0)


def test_scores_of_dflash2_are_finite_and_those_of_its_candidates(tmp_path: Path) -> None:
    forward = load_draft(draft(tmp_path / "draft", "dflash2")).forward
    assert isinstance(forward, BlockForward)
    hidden = torch.randn(3, 64 + 24, generator=torch.manual_seed(0))
    scores, logits = forward.scores(hidden), forward.logits(hidden)
    assert bool(scores.isfinite().all())
    assert logits.isfinite().sum(-1).tolist() == [8, 8, 8]
    assert torch.equal(logits[logits.isfinite()], scores[logits.isfinite()])
