"""How far a draft's proposals move when its keys and values are read from caches."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ...quantize.drafts.forward import DraftForward, OnCache, whole_rows
from ...quantize.stored.loading import LoadedDraft
from ..passes.draft_inputs import first_hidden
from ..passes.predictions import MAX_LOGITS
from ..traces.manifest import TraceEntry
from ..traces.trace_folder import TraceFolder

ROWS = 512
"""That draft, about: each divergence is a mean over K times so many."""


@torch.inference_mode()
def cache_divergences(
    draft: LoadedDraft,
    traces: TraceFolder,
    caches: Sequence[OnCache],
    *,
    num_draft_tokens: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[float]:
    """KL(as it is ‖ through the cache) in nats of each cache, the mean over rows and depths.

    Args:
        draft: whose cache is not rounded.
        traces: recorded for calibration, long enough for K.
        caches: each as `OnCache`.
        on_progress: called with (prompts done, prompts).

    Raises:
        TraceError: the traces are damaged.
        ForwardError: the draft computes NaN or infinity.
    """
    sample = _sample(traces, num_draft_tokens)
    forwards = [draft.forward.caching(cache) for cache in caches]
    totals, count = torch.zeros(len(caches), dtype=torch.float64), 0
    for done, (entry, rows) in enumerate(sample):
        trace = traces.load(entry)
        hidden = first_hidden(draft, traces, trace)[None]
        token_ids = trace.token_ids[None].to(draft.device)
        wanted = _states(draft.forward, hidden, token_ids, rows, num_draft_tokens)
        count += len(rows) * num_draft_tokens
        for i, forward in enumerate(forwards):
            got = _states(forward, hidden, token_ids, rows, num_draft_tokens)
            totals[i] += sum(map(partial(_divergence, draft.forward), wanted, got))
        on_progress(done + 1, len(sample))
    return [float(total) / count for total in totals]


def _sample(traces: TraceFolder, num_draft_tokens: int) -> list[tuple[TraceEntry, range]]:
    """Every n-th prompt that drafts, and its rows."""
    own = [
        (entry, rows)
        for entry in traces.manifest.prompts
        if (
            rows := whole_rows(
                entry.num_tokens, num_draft_tokens, first_row=entry.prompt_length - 1
            )
        )
    ]
    return own[:: max(1, sum(len(rows) for _, rows in own) // ROWS)]


def _states(
    forward: DraftForward, hidden: Tensor, token_ids: Tensor, rows: range, num_draft_tokens: int
) -> list[Tensor]:
    """[n, D, W] of each pass."""
    passes = forward.passes(hidden, token_ids, rows=rows, num_draft_tokens=num_draft_tokens)
    return [one.hidden.flatten(0, 1) for one in passes]


def _divergence(forward: DraftForward, wanted: Tensor, got: Tensor) -> float:
    """Summed over hidden states [n, D, W], the logits of some rows at a time."""
    together = max(1, MAX_LOGITS // (forward.num_logits * wanted.shape[1]))
    total = 0.0
    for its, mine in zip(*(torch.split(x, together) for x in (wanted, got)), strict=True):
        p = forward.logits(its).float().log_softmax(-1)
        q = forward.logits(mine).float().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    return total
