"""Prompts that go through a draft together: which ones, and how shorter ones are filled up."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ...quantize.drafts.forward import BLOCK_ROWS, whole_rows
from ...quantize.stored.loading import LoadedDraft
from ..traces.manifest import TraceEntry
from ..traces.prompt_trace import PromptTrace
from ..traces.trace_folder import TraceFolder
from .draft_inputs import TraceBatch, first_hidden_of_batch
from .predictions import Proposals, batch_proposals

MAX_TOKENS = 4096
"""Of a batch, with what shorter prompts are filled up with; more is hardly faster."""


def batches_of(
    entries: Sequence[TraceEntry], *, max_tokens: int = MAX_TOKENS, max_prompts: int | None = None
) -> list[list[int]]:
    """Positions of prompts to run together, alike in length so that little is filled up.

    Args:
        max_tokens: prompts of a batch times tokens of its longest; one prompt is always a batch.
        max_prompts: of a batch, whatever their lengths; None = as many as `max_tokens` lets.

    Returns:
        Every position once.
    """

    def lengths(position: int) -> tuple[int, int]:
        return entries[position].prompt_length, entries[position].num_tokens

    batches: list[list[int]] = []
    longest = 0
    for position in sorted(range(len(entries)), key=lengths):
        count = entries[position].num_tokens
        last = batches[-1] if batches else []
        fits = (len(last) + 1) * max(longest, count) <= max_tokens
        if last and (fits if max_prompts is None else len(last) < max_prompts):
            last.append(position)
            longest = max(longest, count)
        else:
            batches.append([position])
            longest = count
    return batches


def work_of(entries: Sequence[TraceEntry], num_draft_tokens: int) -> int:
    """Positions that a draft computes along prompts that go through it together, for progress.

    Every prompt is as long as the longest; behind each token of its continuation stand K - 1 more.
    """
    tokens = max(entry.num_tokens for entry in entries)
    rows = tokens - min(entry.prompt_length for entry in entries)
    return len(entries) * (tokens + rows * (num_draft_tokens - 1))


def read_ahead(
    traces: TraceFolder, batches: Sequence[Sequence[int]], device: torch.device
) -> Iterator[TraceBatch]:
    """Read batches one after the other, each while a caller works on the one before.

    Args:
        batches: positions of prompts, see `batches_of`.

    Raises:
        TraceError: the traces are damaged; once the batches before were given.
    """
    prompts = traces.manifest.prompts

    def read(positions: Sequence[int]) -> TraceBatch:
        return TraceBatch([traces.load(prompts[position]) for position in positions], device)

    with ThreadPoolExecutor(max_workers=1) as reader:
        coming = [reader.submit(read, positions) for positions in batches[:1]]
        for i in range(len(batches)):
            coming += [reader.submit(read, positions) for positions in batches[i + 1 : i + 2]]
            yield coming.pop(0).result()


def proposals_of_batch(
    draft: LoadedDraft,
    traces: TraceFolder,
    batch: Sequence[PromptTrace],
    *,
    num_draft_tokens: int,
    temperature: float | None = None,
) -> list[Proposals]:
    """What a draft proposes along several prompts: for each what `draft_proposals` gives.

    Up to the first proposal of a row that is not accepted, that is: what would come behind it does
    not count, and is left out wherever no other row needs it. One scale for the inputs of a whole
    call needs all of them.

    Prompts are filled up behind with their own last token and features: nothing looks ahead, and
    what is filled up is finite wherever the prompt is.

    Args:
        draft: whose inputs are not rounded under one scale of a whole call (`rounds_alone`), or
            the batch has one prompt.
        batch: at least one prompt.
        num_draft_tokens: K, one that `num_draft_tokens_fault` finds nothing wrong with.
        temperature: see `draft_proposals`.

    Returns:
        Per prompt, on the CPU.

    Raises:
        TraceError: the draft has no embedding of a token.
        ForwardError: the draft computes NaN or infinity.
    """
    own = [whole_rows(t.num_tokens, num_draft_tokens, first_row=t.prompt_length - 1) for t in batch]
    rows = range(min(one.start for one in own), max(one.stop for one in own))
    together = TraceBatch.of(batch, draft.device)
    hidden = first_hidden_of_batch(draft, traces, together)
    proposed = batch_proposals(
        draft.forward,
        hidden,
        together.token_ids,
        rows=rows,
        num_draft_tokens=num_draft_tokens,
        temperature=temperature,
        block_rows=min(BLOCK_ROWS, max(1, MAX_TOKENS // len(batch))),
        counted=own if draft.rounds_alone else None,
    ).cpu()
    return [
        proposed.of_sequence(i, slice(one.start - rows.start, one.stop - rows.start))
        for i, one in enumerate(own)
    ]
