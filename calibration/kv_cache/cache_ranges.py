"""How large the keys and values are that a draft keeps, along all that K draft tokens need."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantize.drafts.kv_cache import cached_layers
from ...quantize.stored.loading import LoadedDraft
from ..errors import CalibrationError
from ..linear_inputs.trace_runs import run_over_traces
from ..traces.trace_folder import TraceFolder

_SMALLEST = 2.0**-10
"""Half of E4M3's smallest number above zero: what is no larger is kept as zero."""
_NORMAL = 2.0**-6
"""Below it E4M3 has fewer than four significant bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRange:
    """Magnitudes of what one layer keeps of keys, or of values.

    Attributes:
        absmax: of each key-value head the largest; of latent attention that of the one entry.
        beyond: share of the elements above 448, cut off at unit scales.
        coarse: share of them, other than zero, below 2^-6, kept with fewer bits at unit scales.
        lost: share of them, other than zero, kept as zero at unit scales.
    """

    absmax: tuple[float, ...]
    beyond: float
    coarse: float
    lost: float

    @property
    def largest(self) -> float:
        """Of all heads."""
        return max(self.absmax)


Ranges = Mapping[int, tuple[CacheRange, CacheRange]]
"""By layer: keys and values. Latent attention keeps one entry, which both are."""


def measure_cache_ranges(
    draft: LoadedDraft,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Ranges:
    """Ranges of all keys and values, of the context and of every later step.

    Args:
        draft: whose cache is not rounded.
        num_draft_tokens: K, as it will be served: later steps keep keys of the draft's own states.
        on_progress: called with (work done, work).

    Raises:
        CheckpointError: the draft has no KV cache.
        TraceError: the traces do not fit the draft.
        CalibrationError: the draft cannot propose K tokens, or no trace is long enough.
        ForwardError: the draft computes NaN or infinity.
    """
    layers = cached_layers(draft.weights, draft.name)
    seen: dict[int, tuple[_Sum, _Sum]] = {layer: (_Sum(), _Sum()) for layer in layers}

    def watch(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        of_keys, of_values = seen[layer]
        of_keys.add(keys)
        if values.shape[-1]:
            of_values.add(values)
        return keys, values

    run_over_traces(
        draft.forward.caching(watch),
        draft,
        traces,
        num_draft_tokens=num_draft_tokens,
        on_progress=on_progress,
    )
    found: dict[int, tuple[CacheRange, CacheRange]] = {}
    for layer, (of_keys, of_values) in seen.items():
        if of_keys.empty:
            raise CalibrationError(
                traces.folder,
                f"no continuation is longer than {num_draft_tokens} tokens, so no key was kept",
                fix="record longer continuations: --max-new-tokens",
            )
        keys = of_keys.range()
        found[layer] = keys, keys if of_values.empty else of_values.range()
    return found


class _Sum:
    """What was seen of the keys, or of the values, of a layer."""

    def __init__(self) -> None:
        self._absmax: Tensor | None = None
        self._counts: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """[B, KV, T, D]; a GPU is not waited for."""
        size = x.detach().abs()
        absmax = size.amax((0, 2, 3))
        below = (size > 0) & (size < _NORMAL)
        counts = torch.stack(
            [
                torch.tensor(x.numel(), device=x.device),
                (size > torch.finfo(torch.float8_e4m3fn).max).sum(),
                below.sum(),
                (below & (size <= _SMALLEST)).sum(),
            ]
        )
        if self._absmax is not None and self._counts is not None:
            absmax, counts = torch.maximum(self._absmax, absmax), self._counts + counts
        self._absmax, self._counts = absmax, counts

    @property
    def empty(self) -> bool:
        """Nothing was kept."""
        return self._absmax is None

    def range(self) -> CacheRange:
        """Of all that was seen, something at least."""
        assert self._absmax is not None
        assert self._counts is not None
        count, beyond, coarse, lost = self._counts.tolist()
        return CacheRange(
            absmax=tuple(self._absmax.double().tolist()),
            beyond=beyond / count,
            coarse=coarse / count,
            lost=lost / count,
        )


def octave_above(x: float) -> float:
    """The smallest power of two that is no smaller; 1 for zero."""
    if x == 0:
        return 1.0
    mantissa, exponent = math.frexp(x)  # mantissa in [0.5, 1)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
