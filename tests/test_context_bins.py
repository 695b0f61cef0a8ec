"""Context bins: which bin a verify step is in, replayed, expected and served, by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.passes.proposals import Proposals
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.recipes.errors import CompareError
from draftquant.validate.comparison.sources import ReplayedDraft, read_replays
from draftquant.validate.counting.acceptance_counts import (
    AcceptanceCounts,
    ContextBins,
    ContextCounts,
    pooled,
)
from draftquant.validate.counting.draft_counts import context_edges, in_context_bin
from draftquant.validate.counting.trace_replay import counted_prompt
from handmade_replays import replay

K = 2
EDGES = ContextBins(edges=(4, 6))


def trace(accepting: list[int], prompt_length: int = 2) -> tuple[PromptTrace, Proposals]:
    """A text and proposals of which each row accepts so many; K more tokens end the text."""
    first = prompt_length + 1
    tokens = torch.arange(first + len(accepting) + K - 1)
    named: dict[str, Any] = {"id": "hand", "category": "all", "prompt_length": prompt_length}
    read = torch.zeros(len(tokens), 1)
    found = PromptTrace(**named, token_ids=tokens, features=read, target_top1=tokens[1:])
    proposed = [
        [first + row + j if j < own else -1 for j in range(K)] for row, own in enumerate(accepting)
    ]
    return found, Proposals(token_ids=torch.tensor(proposed), recorded_logprobs=None)


def test_expected_steps_are_binned_by_their_rows_and_agree_with_counted_ones() -> None:
    """Where every proposal is certainly accepted or not, expected steps are the counted ones."""
    told, proposed = trace([1, 2, 0, 2, 1, 0, 0])
    counted = counted_prompt(told, proposed, EDGES)
    certain = torch.where(proposed.token_ids >= 0, 0.0, -torch.inf).float()
    drawn = dataclasses.replace(proposed, recorded_logprobs=certain)
    with_logprobs = dataclasses.replace(told, token_logprob=torch.zeros(len(told.token_ids) - 2))
    assert counted_prompt(with_logprobs, drawn, EDGES).contexts == counted.contexts
    half = dataclasses.replace(drawn, recorded_logprobs=torch.full((7, K), 0.5).log())
    halves = counted_prompt(with_logprobs, half, EDGES)
    assert pooled(halves.contexts.counts, K).histogram == pytest.approx(halves.counts.histogram)
    assert all(own.num_steps for own in halves.contexts.counts)


def test_a_file_of_replays_has_bins_that_are_parts_of_their_prompts_or_none(tmp_path: Path) -> None:
    made = replay([(3, 2)])
    counts = tuple(AcceptanceCounts(histogram=own) for own in ((1, 2), (2, 0), (0, 0)))
    whole = ContextCounts(bins=EDGES, counts=counts)
    prompts = tuple(dataclasses.replace(one, contexts=whole) for one in made.prompts)
    found = dataclasses.replace(made, prompts=prompts)
    assert context_edges(found.prompts) == (4, 6)
    nothing = AcceptanceCounts(histogram=(0, 0))
    assert ContextCounts(bins=EDGES, counts=(nothing,) * 3).histograms == ((0, 0),)
    draft = ReplayedDraft.of(found, rope_theta=None, dtype="bfloat16")
    plain = json.loads(json.dumps(draft.to_mapping()))
    assert plain["prompts"][0]["context_bins"] == [[1, 2], [2, 0]]
    path = tmp_path / "replay.json"
    path.write_text(json.dumps([plain]), encoding="utf-8")
    (read,) = read_replays(path)
    (counted,) = read.counted
    assert counted.contexts is not None
    assert counted.contexts.histograms == ((1, 2), (2, 0))
    for bins, edges in (
        ([[1, 2], [1, 0]], [4, 6]), ([[3, 2], [0]], [4, 6]), ([[4, 2], [-1, 0]], [4, 6]),
        ([[3, 2]] * 2, []), ([[3, 2]], [6, 4]),
    ):  # fmt: skip
        plain["prompts"][0]["context_bins"], plain["context_edges"] = bins, edges
        path.write_text(json.dumps([plain]), encoding="utf-8")
        with pytest.raises(CompareError):
            read_replays(path)
    del plain["prompts"][0]["context_bins"], plain["context_edges"]
    path.write_text(json.dumps([plain]), encoding="utf-8")
    assert read_replays(path)[0].counted[0].contexts is None


@pytest.mark.parametrize(("steps", "there"), [(1.0, True), (0.002, True), (0.001, False)])
def test_a_step_says_something_of_a_bin_and_a_thousandth_nothing(steps: float, there: bool) -> None:
    each = (ContextCounts(bins=EDGES, counts=(AcceptanceCounts(histogram=(number, 0, 0)),) * 3)
            for number in (steps, 1.0))  # fmt: skip
    few, one = (dataclasses.replace(replay([(5, 3, 2)]).prompts[0], contexts=c) for c in each)
    assert [bool(in_context_bin([pair], 1)) for pair in ((few, one), (one, few))] == [there] * 2
