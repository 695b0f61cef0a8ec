"""Ranges of what linears read, step by step along all that K draft tokens need.

Step 1 of a chain reads the target's features, every later one the draft's own hidden states: other
distributions, which one static scale has to serve. The concat input of EAGLE-3 has two halves, the
embedding and the hidden state. A block draft takes one step, and its keys and values read the
context as well as the block.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from ...quantize.drafts.forward import DraftPass
from ...quantize.drafts.fused import fused_group
from ...quantize.stored.loading import LoadedDraft
from ..traces.trace_folder import TraceFolder
from .input_range import InputRange
from .trace_runs import never_run, run_over_traces

Half = Literal["whole", "embedding", "hidden"]


@dataclass(frozen=True, slots=True, order=True)
class RangeKey:
    """Which inputs: canonical module name, draft step from 1 on, and part of a concat input."""

    module: str
    step: int
    half: Half


Ranges = Mapping[RangeKey, InputRange]
K = TypeVar("K", bound=Hashable)


def measure_ranges(
    draft: LoadedDraft,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Ranges:
    """Ranges of the inputs of every attention and MLP linear, before any rounding.

    Those of several trace folders add up to those of all: see `merged`.

    Args:
        draft: in BF16 or wider values.
        traces: recorded for calibration.
        num_draft_tokens: K, as it will be served.
        on_progress: called with (work done, work).

    Raises:
        TraceError: the traces do not fit the draft.
        CalibrationError: the draft cannot propose K tokens, or no trace is long enough.
    """
    seen = _Seen(draft)
    run_over_traces(
        draft.family.forward(draft.geometry, draft.weights, seen),
        draft,
        traces,
        num_draft_tokens=num_draft_tokens,
        on_pass=seen.end,
        on_progress=on_progress,
    )
    for name in draft.linears:
        if not any(key.module == name for key in seen.ranges):
            raise never_run(traces, name, num_draft_tokens)
    return dict(sorted(seen.ranges.items()))


def merged(several: Iterable[Ranges]) -> Ranges:
    """Ranges of all that several measurements saw, key by key."""
    return _sums(item for ranges in several for item in ranges.items())


def of_modules(ranges: Ranges) -> Mapping[str, InputRange]:
    """All steps and halves of a module together, and of all that engines fuse with it.

    Linears that engines fuse (q/k/v, gate/up) share one static scale.
    """
    by_group = _sums((fused_group(key.module), one) for key, one in ranges.items())
    return {key.module: by_group[fused_group(key.module)] for key in ranges}


def _sums(items: Iterable[tuple[K, InputRange]]) -> dict[K, InputRange]:
    """The ranges of each key, added up."""
    total: dict[K, InputRange] = {}
    for key, one in items:
        total[key] = total[key] + one if key in total else one
    return total


class _Seen:
    """`OnInput` that sketches inputs in layers; their pass is known when it ends."""

    def __init__(self, draft: LoadedDraft) -> None:
        self._linears = frozenset(draft.linears)
        concat = draft.family.concat(draft.geometry)
        self._concat = {name.removesuffix(".weight") for name in concat.linears} if concat else ()
        self._pending: list[tuple[str, Half, InputRange]] = []
        self.ranges: dict[RangeKey, InputRange] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name not in self._linears:
            return x
        if name in self._concat:
            embedding, hidden = x.chunk(2, dim=-1)
            self._pending.append((name, "embedding", InputRange.of(embedding)))
            self._pending.append((name, "hidden", InputRange.of(hidden)))
        else:
            self._pending.append((name, "whole", InputRange.of(x)))
        return x

    def end(self, one: DraftPass) -> None:
        step = one.depths.start + 1
        ended = ((RangeKey(name, step, half), found) for name, half, found in self._pending)
        self.ranges = _sums((*self.ranges.items(), *ended))
        self._pending.clear()
