"""Scales of a draft's FP8 KV cache: the largest magnitude, or what its proposals bear best.

FP8 has the same precision in every octave, so a scale decides only what is cut off at the top and
what is lost at the bottom. `absmax` is the quotient that other tools store, largest / 448: it cuts
off nothing that calibration saw, and all that is larger elsewhere. `measured` is a power of two, in
the middle of those whose divergence is as small as the smallest: other texts may have larger and
smaller values. All powers of two that cut off and lose nothing keep the same values bit for bit.

Both engines keep the same under powers of two, too. vLLM 0.33 divides by a scale in float32; SGLang
0.5.23 divides by it rounded to BF16, and rounds the quotient to BF16 before it rounds to FP8
(`srt/mem_cache/memory_pool.py:2928`).

There is one scale of a layer's keys and one of its values. vLLM can read one for each head
(compressed-tensors' strategy "attn_head"), SGLang cannot; heads would have to differ by more than
a factor of 1,000 for it to matter.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch

from ...quantize.drafts.cache_rounding import CacheRounding
from ...quantize.drafts.kv_cache import CacheScales
from ...quantize.numerics.fp8 import fp8_scale
from ...quantize.stored.loading import LoadedDraft
from ..traces.trace_folder import TraceFolder
from .cache_divergence import cache_divergences
from .cache_ranges import CacheRange, Ranges, measure_cache_ranges, octave_above

OCTAVES = range(-3, 8)
"""Candidates: so many octaves above the power of two that just holds the largest magnitude."""
AS_SMALL = 1.01
"""Times the smallest divergence."""

Octaves = tuple[int, int]
"""Of the keys and of the values of all layers."""


def measure_cache_scales(
    draft: LoadedDraft,
    traces: TraceFolder,
    *,
    how: Literal["absmax", "measured"],
    num_draft_tokens: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Mapping[int, CacheScales]:
    """Scales of every layer, from all keys and values that K draft tokens need.

    Args:
        draft: in BF16 or wider values, its cache not rounded.
        traces: recorded for calibration, not the ones that the gate judges on.
        num_draft_tokens: K, as it will be served.
        on_progress: called with (work done, work), of one run and then of the other.

    Returns:
        By number of the layer. Of latent attention k is the entry's scale, and v the same number.

    Raises:
        CheckpointError: the draft has no KV cache.
        TraceError: the traces do not fit the draft.
        CalibrationError: the draft cannot propose K tokens, or no trace is long enough.
        ForwardError: the draft computes NaN or infinity.
    """
    ranges = measure_cache_ranges(
        draft, traces, num_draft_tokens=num_draft_tokens, on_progress=on_progress
    )
    if how == "absmax":
        return _by_layer(ranges, lambda one, _: quotient(one.largest))
    tried = _tried(ranges)
    divergences = cache_divergences(
        draft,
        traces,
        [CacheRounding(_at(ranges, octaves)) for octaves in tried],
        num_draft_tokens=num_draft_tokens,
        on_progress=on_progress,
    )
    return _at(ranges, best_octaves(dict(zip(tried, divergences, strict=True))))


def quotient(largest: float) -> float:
    """The scale that other tools store: largest / 448 in float32; 1 for zero."""
    return float(fp8_scale(torch.tensor(largest, dtype=torch.float32)))


def best_octaves(divergences: Mapping[Octaves, float]) -> Octaves:
    """The middle of those that are as good as the best, of keys and of values.

    Args:
        divergences: of (k, 0) for every k and (0, v) for every v; or of (k, k) alone.
    """
    if (1, 0) not in divergences:
        both = _middle({k: found for (k, _), found in divergences.items()})
        return both, both
    of_keys = {k: found for (k, v), found in divergences.items() if v == 0}
    of_values = {v: found for (k, v), found in divergences.items() if k == 0}
    return _middle(of_keys), _middle(of_values)


def _middle(divergences: Mapping[int, float]) -> int:
    best = min(divergences.values())
    good = sorted(octave for octave, found in divergences.items() if found <= AS_SMALL * best)
    return good[(len(good) - 1) // 2]


def _tried(ranges: Ranges) -> list[Octaves]:
    if all(keys is values for keys, values in ranges.values()):
        return [(octave, octave) for octave in OCTAVES]
    others = [octave for octave in OCTAVES if octave != 0]
    return [(0, 0), *((octave, 0) for octave in others), *((0, octave) for octave in others)]


def _at(ranges: Ranges, octaves: Octaves) -> Mapping[int, CacheScales]:
    def scale(one: CacheRange, which: int) -> float:
        return 2.0 ** octaves[which] * octave_above(quotient(one.largest))

    return _by_layer(ranges, scale)


def _by_layer(
    ranges: Ranges, scale: Callable[[CacheRange, int], float]
) -> Mapping[int, CacheScales]:
    return {
        layer: CacheScales(k=(scale(keys, 0),), v=(scale(values, 1),))
        for layer, (keys, values) in ranges.items()
    }
