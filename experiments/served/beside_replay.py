"""What an engine wrote and accepted, held against replay of traces that the engine recorded."""

from collections.abc import Sequence
from pathlib import Path

import torch
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.formats import KvCacheDtype
from served.cpu import on_cpu
from served.every_position import NEAR, EveryPosition, every_position, noise
from served.rounds import Rounds, compare

FP8: KvCacheDtype = "fp8_e4m3"


def beside_replay(
    draft: Path,
    traces: TraceFolder,
    texts: Sequence[Sequence[int]],
    accepted: Sequence[Sequence[int]],
    num_draft_tokens: int,
    kv_cache: KvCacheDtype | None,
) -> Rounds:
    """Replay a draft in BF16, as the engine computes, and exactly, which shows what is near.

    Args:
        texts, accepted: per prompt of the traces, see `rounds.compare`.
        kv_cache: format of the draft's keys and values in the engine, if not BF16.
    """

    def positions(dtype: torch.dtype) -> list[EveryPosition]:
        shared = traces.tables(None)
        loaded = load_draft(draft, dtype=dtype, compact=True, shared=shared, kv_cache=kv_cache)
        on = on_cpu(loaded)
        return [every_position(on, traces, trace, num_draft_tokens) for trace in traces]

    as_served, exact = positions(torch.bfloat16), positions(torch.float32)
    near = NEAR * noise(as_served, exact)
    return compare(texts, accepted, list(traces), as_served, num_draft_tokens, near=near)
