"""Ranges of what linears read, step by step along all that K draft tokens need.

Step 1 of a chain reads the target's features, every later one the draft's own hidden states: other
distributions, which one static scale has to serve. The concat input of EAGLE-3 has two halves, the
embedding and the hidden state. A block draft takes one step, and its keys and values read the
context as well as the block.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...quantize.drafts.fused import fused_linear
from ...quantize.stored.loading import LoadedDraft
from ..passes.draft_pass import DraftPass
from ..traces.folder import TraceFolder
from .input_range import InputRange
from .observation import never_run, run_over_traces

Half = Literal["whole", "embedding", "hidden"]


@dataclass(frozen=True, slots=True, order=True)
class RangeKey:
    """Which inputs: canonical module name, draft step from 1 on, and part of a concat input."""

    module: str
    step: int
    half: Half


Ranges = Mapping[RangeKey, InputRange]


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
        on_progress: called with (prompts done, prompts).

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
            raise never_run(f"{traces.folder}: {name}", num_draft_tokens)
    return dict(sorted(seen.ranges.items()))


def merged(several: Iterable[Ranges]) -> Ranges:
    """Ranges of all that several measurements saw, key by key."""
    total: dict[RangeKey, InputRange] = {}
    for ranges in several:
        for key, one in ranges.items():
            total[key] = total[key] + one if key in total else one
    return total


def of_modules(ranges: Ranges) -> Mapping[str, InputRange]:
    """All steps and halves of a module together, and of all that engines fuse with it.

    Linears that engines fuse (q/k/v, gate/up) share one static scale.
    """
    by_group: dict[tuple[str, str], InputRange] = {}
    for key, one in ranges.items():
        group = fused_group(key.module)
        by_group[group] = by_group[group] + one if group in by_group else one
    return {key.module: by_group[fused_group(key.module)] for key in ranges}


def fused_group(module: str) -> tuple[str, str]:
    """The linear into which engines fuse a module, itself where they leave it alone."""
    parent, _, leaf = module.rpartition(".")
    fused = fused_linear(leaf)
    return parent, fused.vllm if fused else leaf


class _Seen:
    """`OnInput` that sketches every input; the pass that it belongs to is known when it ends."""

    def __init__(self, draft: LoadedDraft) -> None:
        concat = draft.family.concat(draft.geometry)
        self._concat = {name.removesuffix(".weight") for name in concat.linears} if concat else ()
        self._pending: list[tuple[str, Half, InputRange]] = []
        self.ranges: dict[RangeKey, InputRange] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name in self._concat:
            embedding, hidden = x.chunk(2, dim=-1)
            self._pending.append((name, "embedding", InputRange.of(embedding)))
            self._pending.append((name, "hidden", InputRange.of(hidden)))
        else:
            self._pending.append((name, "whole", InputRange.of(x)))
        return x

    def end(self, one: DraftPass) -> None:
        step = one.depths.start + 1
        for name, half, found in self._pending:
            key = RangeKey(name, step, half)
            known = self.ranges.get(key)
            self.ranges[key] = known + found if known else found
        self._pending.clear()
