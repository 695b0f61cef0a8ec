"""Prompts of any lengths recorded together: each one is as it is alone, for every kind of cache."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording import batch_plan, continuing
from draftquant.calibration.recording.slot_cache import SlotCache, takes_padding
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.recipes.errors import TraceError
from recorded import record_traces
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, ENDS = 96, [5, 6, 7, 8]
LENGTHS = (5, 17, 9, 12, 30, 3, 9, 21, 2)
NEW = 10


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    stream = torch.Generator().manual_seed(1)
    ids = [torch.randint(6, VOCAB, (length,), generator=stream).tolist() for length in lengths]
    return [Prompt(id=f"p{i}", category="all", token_ids=tuple(x)) for i, x in enumerate(ids)]


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": ENDS,
    "pad_token_id": None,
}  # fmt: skip


def made(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Random weights, large enough that what does not belong to a prompt would show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes)).float()
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("together") / "target")


@pytest.fixture(scope="module")
def alone(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[PromptTrace]:
    return recorded(target, tmp_path_factory.mktemp("together") / "alone", batch_size=1)


def recorded(target: Path, out: Path, **options: Any) -> list[PromptTrace]:
    asked: dict[str, Any] = {"max_new_tokens": NEW, "aux_layer_ids": (0, 2), "batch_size": 4}
    return list(record_traces(target, prompts(), out, **asked | options))


def alike(found: list[PromptTrace], alone: list[PromptTrace], apart: float) -> None:
    for one, own in zip(found, alone, strict=True):
        assert one.token_ids.tolist() == own.token_ids.tolist()
        assert one.target_top1.tolist() == own.target_top1.tolist()
        largest = float(own.features.abs().max())
        torch.testing.assert_close(one.features, own.features, rtol=0, atol=apart * largest)


def test_in_fixed_batches_a_prompt_does_not_depend_on_those_of_other_batches(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, at its position; and what does not fit is an error, not a smaller batch."""
    asked: dict[str, Any] = {"max_new_tokens": NEW, "aux_layer_ids": (0, 2), "batch_size": 4}
    told: list[tuple[int, int]] = []
    whole = record_traces(target, prompts(), tmp_path / "whole", fixed_batches=True,
                          on_progress=lambda *done: told.append(done), **asked)  # fmt: skip
    parts = [
        record_traces(target, prompts()[some], tmp_path / f"{some.start}", **asked)
        for some in (slice(0, 4), slice(4, 8), slice(8, 9))
    ]
    assert [e.id for e in whole.manifest.prompts] == [p.id for p in prompts()]
    for one, own in zip(whole, (trace for part in parts for trace in part), strict=True):
        assert one.token_ids.equal(own.token_ids)
        assert one.features.equal(own.features)
    shares = [done / total for done, total in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    monkeypatch.setattr(batch_plan, "available_bytes", lambda _device: 1)
    with pytest.raises(TraceError, match=r"--fixed-batches: 1 prompts fit into the memory of cpu"):
        record_traces(target, prompts(), tmp_path / "small", fixed_batches=True, **asked)


def test_rows_that_come_and_go_are_as_they_are_alone(
    target: Path, alone: list[PromptTrace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of eight lengths in four rows; some texts end early, long prompts are read in pieces.

    A GPU is asked now and then which rows have ended; they run on meanwhile.
    """
    notes: list[str] = []
    monkeypatch.setattr(continuing, "MAX_LOGITS", 20 * VOCAB)
    monkeypatch.setattr(continuing, "_LOOK_EVERY", {"cpu": 5})
    told: list[tuple[int, int]] = []
    found = recorded(
        target, tmp_path / "many", on_note=notes.append, on_progress=lambda *done: told.append(done)
    )
    assert not notes
    # Rows of 30, 21, 17 and 12 tokens, read in pieces of 20; each first new token counts as two.
    done = [done for done, _ in told]
    assert done[:5] == [20, 30, 52, 53, 72]
    assert max(after - before for before, after in pairwise(done)) == 22
    assert {total for _, total in told} == {sum(LENGTHS) + 2 * NEW * len(LENGTHS)}
    alike(found, alone, 1e-5)
    assert {len(trace.continuation) < NEW for trace in found} == {True, False}


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8, **EXPERTS,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
KINDS: list[tuple[str, dict[str, Any], str | None]] = [
    ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, None),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 16, "n_routed_experts": 4, "n_group": 2,
                     "topk_group": 1, "first_k_dense_replace": 1}, None),
    ("qwen3_next", {**LINEAR, **EXPERTS, "num_experts": 4,
                    "shared_expert_intermediate_size": 16}, None),
    ("llama", DYNAMIC, "its rotary angles depend on the longest text (dynamic)"),
    ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
     "its cache has layers of the kind LinearAttentionAndFullAttentionLayer"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes", "why_not"), KINDS, ids=[kind for kind, *_ in KINDS])
def test_every_kind_of_target(
    kind: str, changes: dict[str, Any], why_not: str | None, tmp_path: Path
) -> None:
    made(tmp_path / "target", kind, **changes)
    notes: list[str] = []
    found = recorded(tmp_path / "target", tmp_path / "many", on_note=notes.append)
    alike(found, recorded(tmp_path / "target", tmp_path / "one", batch_size=1), 1e-4)
    said = "prompts of equal length alone are run together, because of this target: "
    assert notes == ([] if why_not is None else [said + why_not])


@pytest.mark.parametrize("mask", [None, torch.full((1, 1, 1, 1), torch.nan)])
def test_a_target_whose_rows_are_not_independent_is_seen(
    mask: object, target: Path, alone: list[PromptTrace], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Masked nowhere, it sees what is in front of shorter rows; so only equal lengths run."""
    monkeypatch.setattr(continuing.Continuing, "_mask", lambda _self: mask)
    notes: list[str] = []
    found = recorded(target, tmp_path / "many", on_note=notes.append)
    assert "because of this target: its hidden states differ by" in notes[0]
    alike(found, alone, 1e-5)


def test_memory_bounds_the_rows(
    target: Path, alone: list[PromptTrace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(continuing, "MAX_LOGITS", 1)
    monkeypatch.setattr(batch_plan, "MAX_LOGITS", 1)
    # A token: 4 layers of keys and values, 2 heads of 16, in float32; features of 2 x 32, twice.
    row = (40 + 40 // 4 + 64) * 4 * 2 * 2 * 16 * 4 + 40 * 2 * (2 * 32 * 4 + 16) + 24 * VOCAB
    for free in (2 * row + 100, 3 * row - 100):
        monkeypatch.setattr(batch_plan, "available_bytes", lambda _, free=free: int(free / 0.9))
        found = recorded(target, tmp_path / f"{free}", on_note=notes.append)
        assert notes.pop().startswith("2 prompts are run together instead of 4: ")
        alike(found, alone, 1e-5)


def test_what_is_remembered_goes_with_its_row() -> None:
    """Keys in the last columns, recurrent states as they are; and both move when rows are left."""
    read: Any = DynamicCache()
    read.layers = [DynamicLayer(), LinearAttentionLayer()]
    keys, state = torch.arange(6.0).view(2, 1, 3, 1), torch.arange(8.0).view(2, 1, 2, 2) + 1
    read.update(keys, -keys, 0)
    read.update_recurrent_state(state, 1)
    assert not takes_padding(read)  # recurrent states would take it in
    held = SlotCache(read, 3)
    held.restart(5)
    held.admit(read, torch.tensor([2, 0]), None)
    layer, recurrent = held.cache.layers
    assert held.num_columns == 5
    assert torch.equal(layer.keys[[2, 0], :, 2:], keys)
    assert torch.equal(recurrent.recurrent_states[0][[2, 0]], state)
    padding = torch.tensor([[True] * 3 + [False] * 2, [False] * 5])  # of more than a window keeps
    held.admit(read, torch.tensor([2, 0]), padding)
    assert torch.equal(layer.keys[2, 0, 2:, 0], torch.tensor([0.0, 1, 2]))
    assert torch.equal(layer.keys[0, :, 2:], keys[1])
    held.keep(torch.tensor([0, 2]))
    held.trim(3)
    assert torch.equal(layer.values, -keys.flip(0))
    assert torch.equal(recurrent.recurrent_states[0], state.flip(0))
