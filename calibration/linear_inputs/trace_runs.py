"""Running a draft over recorded traces for the sake of what its linears read."""

from collections.abc import Callable
from itertools import accumulate

import torch

from ...quantize.drafts.forward import DraftForward, DraftPass, whole_rows
from ...quantize.stored.loading import LoadedDraft
from ..errors import CalibrationError
from ..passes.batches import work_of
from ..passes.draft_inputs import check_trace_fits, first_hidden
from ..passes.predictions import num_draft_tokens_fault
from ..traces.trace_folder import TraceFolder


def run_over_traces(
    forward: DraftForward,
    draft: LoadedDraft,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    row_stride: int = 1,
    on_pass: Callable[[DraftPass], None] = lambda _pass: None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Draft K tokens from every position of the continuations, teacher-forced as replay does it.

    Args:
        forward: maths of `draft`, over its weights or others; its `OnInput` sees every input: that
            of fc where the traces hold the target's features, that of the head after each pass.
        draft: what reads the traces.
        traces: recorded for calibration, not the ones that the gate judges on.
        num_draft_tokens: K, as it will be served.
        row_stride: distance of the rows that draft, from the first on; the others are context.
        on_pass: called after every pass; what `OnInput` saw since the call before belongs to it.
        on_progress: called with (work done, work) after each prompt; see `work_of`.

    Raises:
        TraceError: the traces do not fit the draft.
        CalibrationError: the draft cannot propose K tokens.
        ForwardError: it computes NaN or infinity.
    """
    fault = num_draft_tokens_fault(draft.geometry, num_draft_tokens)
    if fault:
        raise CalibrationError(f"{draft.name}: num_draft_tokens", fault[0], fix=fault[1])
    check_trace_fits(draft, traces)
    work = [work_of([entry], num_draft_tokens) for entry in traces.manifest.prompts]
    for done, trace in zip(accumulate(work), traces, strict=True):
        rows = whole_rows(trace.num_tokens, num_draft_tokens, first_row=trace.prompt_length - 1)
        rows = rows[::row_stride]
        with torch.inference_mode():
            passes = forward.passes(
                first_hidden(draft, traces, trace, forward)[None],
                trace.token_ids[None],
                rows=rows,
                num_draft_tokens=num_draft_tokens,
            )
            for one in passes:
                forward.head_input(one.hidden)
                on_pass(one)
        on_progress(done, sum(work))


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
