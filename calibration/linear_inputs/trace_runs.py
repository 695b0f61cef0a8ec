"""Running a draft over recorded traces for the sake of what its linears read."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from ...quantize.drafts.forward import BLOCK_ROWS, DraftForward, whole_rows
from ...quantize.stored.loading import LoadedDraft
from ..errors import CalibrationError
from ..passes.batches import work_of
from ..passes.draft_inputs import check_trace_fits, first_hidden_of_batch
from ..passes.predictions import num_draft_tokens_fault
from ..traces.manifest import TraceEntry
from ..traces.trace_folder import TraceFolder

MAX_TOKENS = 2048
"""Of prompts that go through a draft together."""


def run_over_traces(
    forward: DraftForward,
    draft: LoadedDraft,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    row_stride: int = 1,
    together: bool = True,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Draft K tokens from every position of the continuations, teacher-forced as replay does it.

    Args:
        forward: maths of `draft`, over its weights or others; its `OnInput` sees every input: that
            of fc where the traces hold the target's features, that of the head after each pass.
        traces: recorded for calibration, not the ones that the gate judges on.
        num_draft_tokens: K, as it will be served.
        row_stride: distance of the rows that draft, from the first on; the others are context.
        together: prompts of equal lengths may go through the draft at once; not where it rounds the
            inputs of a whole call under one scale.
        on_progress: called with (work done, work) after each batch; see `work_of`.

    Raises:
        TraceError: the traces do not fit the draft.
        CalibrationError: the draft cannot propose K tokens.
        ForwardError: it computes NaN or infinity.
    """
    fault = num_draft_tokens_fault(draft.geometry, num_draft_tokens)
    if fault:
        raise CalibrationError(f"{draft.name}: num_draft_tokens", fault[0], fix=fault[1])
    check_trace_fits(draft, traces)
    batches = _equally_long(traces.manifest.prompts, MAX_TOKENS if together else 0)
    work = [work_of(batch, num_draft_tokens) for batch in batches]
    for done, batch in zip(accumulate(work), batches, strict=True):
        prompts = [traces.load(entry) for entry in batch]
        first_row = prompts[0].prompt_length - 1
        rows = whole_rows(prompts[0].num_tokens, num_draft_tokens, first_row=first_row)
        with torch.inference_mode():
            passes = forward.passes(
                first_hidden_of_batch(draft, traces, prompts, forward),
                torch.stack([prompt.token_ids for prompt in prompts]).to(draft.device),
                rows=rows[::row_stride],
                num_draft_tokens=num_draft_tokens,
                block_rows=min(BLOCK_ROWS, max(1, MAX_TOKENS // len(batch))),
            )
            for one in passes:
                forward.head_input(one.hidden)
        on_progress(done, sum(work))


def _equally_long(entries: Sequence[TraceEntry], max_tokens: int) -> list[list[TraceEntry]]:
    """Prompts that go through a draft together: of the same lengths, so that nothing is filled up.

    What is filled up would be seen by who observes inputs, and an expert does not tell where its
    inputs come from.
    """
    batches: list[list[TraceEntry]] = []
    open_ones: dict[tuple[int, int], list[TraceEntry]] = {}
    for entry in entries:
        lengths = entry.prompt_length, entry.num_tokens
        batch = open_ones.get(lengths)
        if batch is None or (len(batch) + 1) * entry.num_tokens > max_tokens:
            batch = open_ones[lengths] = []
            batches.append(batch)
        batch.append(entry)
    return batches


def never_run(traces: TraceFolder, name: str, num_draft_tokens: int) -> CalibrationError:
    """The error for a linear that nothing has run through."""
    where = f"{traces.folder}: {name}"
    if name == "fc" and traces.manifest.features.kind == "fused":
        return CalibrationError(
            where,
            "the traces hold the outputs of this linear (fused features), not its inputs",
            fix="record traces without --fused, or keep fc in the recipe",
        )
    return CalibrationError(
        where,
        "the traces do not reach this linear: no continuation is longer than"
        f" {num_draft_tokens} tokens",
        fix="record longer continuations: --max-new-tokens",
    )
