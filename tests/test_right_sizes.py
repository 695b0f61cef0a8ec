"""Acceptance at every size in one replay, against replays of drafts that are really cut."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from draftquant.calibration.row_choice import RowOrder, TokenCounts, said_texts
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.validate.comparison.right_sizes import right_sizes
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.trace_replay import replay_drafts
from said_traces import VOCAB, row_order, write_said
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_LAYERS = (1, 3, 5)
KINDS: Mapping[str, tuple[Callable[[Path], Path], Sequence[int], int]] = {
    "chain": (tiny_eagle3_llama, (1, 3, 4), 3),
    "d2t": (lambda folder: tiny_eagle3_llama(folder, pruned_vocabulary=True), (1, 3, 4), 3),
    "block": (lambda folder: tiny_dflash(folder, num_layers=1), BLOCK_LAYERS, 7),
    "dspark": (lambda folder: tiny_dspark(folder, num_layers=1), BLOCK_LAYERS, 4),
}


def shared() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn((VOCAB, 64), generator=generator)
        for name in ("embed_tokens.weight", "lm_head.weight")
    }


def cut(draft: LoadedDraft, token_ids: Sequence[int]) -> LoadedDraft:
    """The draft with rows for some tokens only, as a folder of it would be loaded."""
    have = draft.forward.to_target(torch.arange(draft.forward.num_logits)).tolist()
    rows = torch.tensor([have.index(token) for token in sorted(token_ids)])
    specs = draft.family.tensor_specs(draft.geometry)
    shrinking = {n for n, s in specs.items() if s.shape[0].follows_from == "draft_vocab_size"}
    weights = {
        name: weight[rows] if name in shrinking else weight
        for name, weight in draft.weights.items()
    }
    weights["d2t"] = torch.tensor(sorted(token_ids)) - torch.arange(len(rows))
    geometry = dataclasses.replace(draft.geometry, draft_vocab_size=len(rows))
    forward = draft.family.forward(geometry, weights, draft.forward.on_input)
    return dataclasses.replace(draft, geometry=geometry, weights=weights, forward=forward)


def orders_of(draft: LoadedDraft, traces: TraceFolder) -> list[RowOrder]:
    """By the text, and by nothing but the ids of the tokens from behind."""
    offered = draft.forward.to_target(torch.arange(draft.forward.num_logits)).tolist()
    said = TokenCounts.of(said_texts(traces), VOCAB)
    backwards = list(range(VOCAB - 1, -1, -1))
    return [row_order(said, offered=offered), row_order(said, offered=offered, always=backwards)]


def replayed(draft: LoadedDraft, traces: TraceFolder, k: int) -> list[AcceptanceCounts]:
    (found,) = replay_drafts([draft], traces, num_draft_tokens=k)
    return [prompt.counts for prompt in found.prompts]


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", KINDS)
def test_counts_at_every_size_are_those_of_a_really_cut_draft(kind: str, tmp_path: Path) -> None:
    build, layers, k = KINDS[kind]
    traces = write_said(tmp_path / "traces", layers=layers, prompts=5)
    draft = load_draft(build(tmp_path / "draft"), dtype=torch.float64, shared=shared())
    orders = orders_of(draft, traces)
    whole = draft.forward.num_logits
    found = right_sizes(draft, traces, orders, [(0, 1)] * len(traces), num_draft_tokens=k)
    assert [own[0].counts(whole) for own in found] == replayed(draft, traces, k)
    accepted = 0.0
    for number, order in enumerate(orders):
        for size in (1, 2, 5, 13, whole - 1):
            really = replayed(cut(draft, order.first(size)), traces, k)
            assert [own[number].counts(size) for own in found] == really, (number, size)
            accepted += sum(counts.num_accepted_draft_tokens for counts in really)
    assert accepted > 50


def test_equal_logits_go_to_the_lower_target_id_as_in_a_cut_draft(tmp_path: Path) -> None:
    """Rows that are equal bit by bit: products of a head with one entry in each row are exact."""
    traces = write_said(tmp_path / "traces")
    loaded = load_draft(tiny_eagle3_llama(tmp_path / "draft"), dtype=torch.float64)
    head = torch.eye(6, dtype=torch.float64)[torch.arange(VOCAB) % 6]
    weights = {**loaded.weights, "lm_head.weight": torch.nn.functional.pad(head, (0, 58))}
    forward = loaded.family.forward(loaded.geometry, weights, loaded.forward.on_input)
    draft = dataclasses.replace(loaded, weights=weights, forward=forward)
    orders = orders_of(draft, traces)
    found = right_sizes(draft, traces, orders, [(0, 1)] * len(traces), num_draft_tokens=3)
    for number, order in enumerate(orders):
        for size in (2, 20, 95):
            really = replayed(cut(draft, order.first(size)), traces, 3)
            assert [own[number].counts(size) for own in found] == really


def test_each_prompt_is_asked_about_its_own_orders_in_any_batch(tmp_path: Path) -> None:
    traces = write_said(tmp_path / "traces")
    draft = load_draft(tiny_eagle3_llama(tmp_path / "draft"), dtype=torch.float64)
    orders = orders_of(draft, traces)
    both = right_sizes(draft, traces, orders, [(0, 1)] * len(traces), num_draft_tokens=3)
    turns = [(i % 2,) for i in range(len(traces))]
    steps: list[tuple[int, int]] = []
    one = right_sizes(
        draft, traces, orders, turns, num_draft_tokens=3, batch_size=3,
        on_progress=lambda done, total: steps.append((done, total)),
    )  # fmt: skip
    for number, (all_orders, own) in enumerate(zip(both, one, strict=True)):
        for size in (2, 9, 40):
            assert own[0].counts(size) == all_orders[number % 2].counts(size)
    assert len(steps) == 3
    assert steps[-1][0] == steps[-1][1]
