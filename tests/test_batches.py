"""Prompts in batches: which go together, and that a batch counts what single prompts count."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.passes import draft_inputs
from draftquant.calibration.passes.draft_inputs import first_hidden_of_batch
from draftquant.calibration.passes.on_traces import chosen_num_draft_tokens
from draftquant.calibration.passes.proposals import NOTHING
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.traces import trace_folder
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.files import mapped_rows
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.validate.counting.trace_replay import replay_drafts
from recorded import record_traces

PAIRS = Path(__file__).parent / "pairs"
NUM_PROMPTS = 6
SLOW = pytest.mark.slow

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["eagle3-llama", pytest.param("dflash", marks=SLOW)])
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    """Prompts of 12 to 48 tokens, so that rows of a batch differ at both ends."""
    pair = PAIRS / request.param
    prompts = [
        dataclasses.replace(p, token_ids=p.token_ids[-12 - 6 * (-i % NUM_PROMPTS) :])
        for i, p in enumerate(read_prompts(pair / "prompts.jsonl")[:NUM_PROMPTS])
    ]
    return record_traces(
        pair / "target", prompts, tmp_path_factory.mktemp("batches") / request.param,
        max_new_tokens=40, aux_layer_ids=(0, 1, 2), table_ids=(0,),
    )  # fmt: skip


def draft_of(traces: TraceFolder, **options: Any) -> LoadedDraft:
    return load_draft(PAIRS / traces.folder.name / "draft", shared=traces.tables(), **options)


def test_a_batch_counts_what_single_prompts_count(traces: TraceFolder) -> None:
    """Logits differ by rounding; a nearly equal pair of them would show as another count."""
    draft = draft_of(traces)
    k = chosen_num_draft_tokens(None, [draft])
    single = replay_drafts([draft], traces, num_draft_tokens=k, batch_size=1)[0]
    assert [p.id for p in single.prompts] == [p.id for p in traces.manifest.prompts]
    assert single.counts.num_steps > 20 * NUM_PROMPTS / 4
    for options in ({}, {"batch_size": 3}, {"max_tokens": 200}):
        (batched,) = replay_drafts([draft], traces, num_draft_tokens=k, **options)
        assert (batched.prompts, batched.first_step) == (single.prompts, single.first_step)
        assert dataclasses.replace(batched.traces, features=single.traces.features) == single.traces


def test_prompts_share_no_call_scale(traces: TraceFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = draft_of(traces)
    assert draft.rounds_alone
    whole = dataclasses.replace(draft, activations=dict.fromkeys(draft.linears, "tensor-dynamic"))
    assert not whole.rounds_alone
    sizes: list[int] = []
    original = draft_inputs.proposals_of_batch

    def noted(*arguments: Any, **options: Any) -> Any:
        sizes.append(len(arguments[2]))
        return original(*arguments, **options)

    monkeypatch.setattr("draftquant.validate.counting.replay_cache.proposals_of_batch", noted)
    replay_drafts([draft, whole], traces, num_draft_tokens=3)
    assert sizes == [1] * 2 * NUM_PROMPTS
    batch = [traces.load(traces.manifest.prompts[0])]
    for one, has_holes in ((draft, True), (whole, False)):
        ids = original(one, traces, batch, num_draft_tokens=3)[0].token_ids
        assert bool((ids == NOTHING).any()) is has_holes


def test_long_text_is_read_by_blocks(traces: TraceFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64: a block of another shape may add a value's n products in another order.

    Each order errs by at most n 2^-53 of the sum of their magnitudes (Higham, Accuracy and
    Stability, 3.1), which is at most sqrt(n) times the root of the sum of their squares, and that
    is the size of a value whose products have random signs.
    """
    draft, (first, second, *_) = draft_of(traces, dtype=torch.float64), traces.manifest.prompts
    n = traces.load(first).features.shape[1]
    asked = ([first], [first, second])
    whole = [first_hidden_of_batch(draft, traces, [*map(traces.load, one)]) for one in asked]
    for module in (mapped_rows, draft_inputs, trace_folder):
        monkeypatch.setattr(module, "BLOCK_ROWS", 7)
    for one, expected in zip(asked, whole, strict=True):
        found = first_hidden_of_batch(draft, traces, [*map(traces.load, one)])
        bound = 2 * n**1.5 * 2.0**-53 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)
