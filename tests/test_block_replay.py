"""Block replay against an engine-style loop that really decodes: every step and token is the same.

The loop (`engine_loop.py`) runs a transformers target and the independent draft of
`reference_dflash.py` with KV caches; replay runs our forward maths on the recorded trace. Both in
float64 throughout, so that the two disagree about a logit by 1e-10 at most and a near-tie does not
decide.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from block_pair import AS_NEMOTRON, BLOCK_SIZE, shared_tables, with_own_tensors
from draftquant.calibration.linear_inputs.static_scales import measure_absmax
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.quantize.drafts import passes as block
from draftquant.quantize.drafts.families.dflash import DFlash
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.validate.counting.trace_replay import replay_drafts
from proposing import draft_proposals
from reference_dflash import (
    ReferenceDFlash,
    ReferenceDFlash2,
    ReferenceDSpark,
    random_weights,
    round_inputs,
)
from replay_proof import RoundInput, assert_replay_is_the_engine, quantized_folder, unrounded
from rounding_pairs import shared_pair
from torch import Tensor
from transformers import Qwen3ForCausalLM

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

K = BLOCK_SIZE - 1
PAIR = shared_pair("dflash")
FEW = PAIR.traces.only(PAIR.traces.manifest.prompts[:4])
KIN = {"dflash": ReferenceDFlash, "dflash2": ReferenceDFlash2, "dspark": ReferenceDSpark}


@pytest.fixture
def target() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(PAIR.folder / "target", dtype=torch.float64)


def loaded(folder: Path = PAIR.draft_folder) -> LoadedDraft:
    return load_draft(folder, dtype=torch.float64, shared=shared_tables(PAIR.folder / "target"))


@pytest.mark.parametrize(
    ("kind", "recipe", "k"),
    [
        ("dflash", "mi325x-w4a8", 3),  # fewer masks than it was trained with: a shorter block
        pytest.param("dflash", "blackwell-fp8", K, marks=pytest.mark.slow),
        ("dflash2", None, K),
        pytest.param("dspark", None, K, marks=pytest.mark.slow),
    ],
)
def test_replay_equals_the_engine(
    kind: Any, recipe: str | None, k: int, target: Qwen3ForCausalLM, tmp_path: Path
) -> None:
    """Of kin of DFlash each token is chosen behind those that were chosen, not behind recorded."""
    folder, round_input = PAIR.draft_folder, unrounded
    if kind != "dflash":
        own = AS_NEMOTRON if kind == "dspark" else {}
        folder = with_own_tensors(folder, tmp_path / "draft", kind, **own)
    if recipe is not None:
        tables = shared_tables(PAIR.folder / "target")
        round_input = quantized_folder(folder, tmp_path / "out", recipe, FEW, k, tables)
        folder = tmp_path / "out"
    draft = loaded(folder)
    assert "mask_embedding" in draft.weights or kind == "dspark"  # the side file travelled
    counts = assert_replay_is_the_engine(
        draft, round_input, target, FEW, num_draft_tokens=k, reference=KIN[kind]
    )
    assert counts.mean_acceptance_length > 1.15
    assert sum(steps > 0 for steps in counts.histogram) > min(k, 3), "accept counts have to vary"
    (replay,) = replay_drafts([draft], FEW, num_draft_tokens=k)
    assert replay.counts == counts


@pytest.mark.parametrize(("block_rows", "max_scores"), [(15, 1), (256, 2**24)])
def test_rows_are_blocks(block_rows: int, max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full and sliding layers, grouped heads, random weights: all rows at once, or one by one."""
    monkeypatch.setattr(block, "MAX_SCORES", max_scores)
    config = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 60,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "block_size": 6,
        "dflash_config": {
            "mask_token_id": 7, "target_layer_ids": [1, 3], "attention_sink_bias": True,
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
    }  # fmt: skip
    geometry = DFlash().read_geometry(config, "config.json")
    weights = random_weights(geometry, seed=3)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(60, (24,), generator=generator)
    features = torch.randn((1, 23, 64), generator=generator, dtype=torch.float64)
    forward = DFlash().forward(geometry, weights, unrounded)
    k, first, hidden = 4, 5, forward.fuse(features)[0]
    predicted = draft_proposals(
        forward, hidden, token_ids, first_row=first, num_draft_tokens=k, block_rows=block_rows
    ).token_ids
    assert predicted.shape == (24 - 1 - k - first, k)
    for anchor, drafted in enumerate(predicted.tolist(), start=first + 1):
        reference = ReferenceDFlash(geometry, weights)
        reference.extend(features[:, :anchor])
        assert drafted == reference.draft(int(token_ids[anchor]), k)


@pytest.mark.parametrize("context_gain", [0.1, 8.0])
def test_static_scales_see_the_context_and_the_block(context_gain: float) -> None:
    """Against the inputs of an online loop; either distribution alone would clip the other."""
    few = PAIR.traces.only(PAIR.traces.manifest.prompts[:1])
    draft = loaded()
    louder = {"hidden_norm.weight": context_gain * draft.weights["hidden_norm.weight"]}
    weights = {**draft.weights, **louder}
    forward = draft.family.forward(draft.geometry, weights, unrounded)
    draft = dataclasses.replace(draft, weights=weights, forward=forward)
    context, own = dict[str, float](), dict[str, float]()

    def into(found: dict[str, float]) -> RoundInput:
        def observe(name: str, x: Tensor) -> Tensor:
            found[name] = max(found.get(name, 0.0), float(x.abs().max()))
            return x

        return observe

    for trace in few:
        for anchor in range(trace.prompt_length, trace.num_tokens - K):
            read = trace.features[None, :anchor]
            ReferenceDFlash(draft.geometry, weights, into(context)).extend(read)
            reference = ReferenceDFlash(draft.geometry, weights)
            reference.extend(read)
            round_inputs(reference, into(own))
            reference.propose(int(trace.token_ids[anchor]), K)
    measured = measure_absmax(DraftRun(draft, few, K))
    assert sorted(measured) == sorted(draft.linears)
    for layer in range(2):
        attention = f"layers.{layer}.self_attn."
        sides = context[f"{attention}k_proj"], own[f"{attention}k_proj"]
        assert (sides[0] > sides[1]) == (context_gain > 1), "each side is the larger one once"
        for name in ("q_proj", "k_proj", "v_proj"):  # fused: one scale
            assert measured[attention + name] == pytest.approx(max(sides), rel=1e-9)
        for name in (f"{attention}o_proj", f"layers.{layer}.mlp.down_proj"):
            assert measured[name] == pytest.approx(own[name], rel=1e-9)
