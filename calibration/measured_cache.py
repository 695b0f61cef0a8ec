"""Scales of a draft's FP8 KV cache: the largest magnitude, or the least change of its proposals.

FP8 has the same precision in every octave, so a scale decides only what is clipped at the top and
lost at the bottom. `absmax` is the quotient that other tools store, largest / 448: it clips
nothing that calibration saw, and everything larger elsewhere. `measured` is a power of two, in
the middle of those whose divergence is about the smallest: other texts may have larger and
smaller values. All powers of two that clip and lose nothing keep the same values bit for bit.

Both engines keep equal values under powers of two, too. vLLM 0.33 divides by a scale in float32;
SGLang 0.5.23 divides by it rounded to BF16, and rounds the quotient to BF16 before it rounds to FP8
(`srt/mem_cache/memory_pool.py:2928`).

A layer has one scale for keys and one for values. vLLM can read one for each head
(compressed-tensors' strategy "attn_head"), SGLang cannot; heads would have to differ by more than
a factor of 1,000 for it to matter.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..quantize.drafts.draft_cache import CacheRounding, CacheScales, cached_layers
from ..quantize.drafts.forward import DraftForward, OnCache
from ..quantize.numerics.number_formats import fp8_scale
from ..recipes.errors import CalibrationError
from ..recipes.listener import SILENT, Listener, Progress, unseen
from .linear_inputs.static_scales import octave_above, run_over_traces
from .passes.draft_inputs import DraftRun, first_hidden
from .passes.proposals import MAX_LOGITS

ROWS = 512  # rows to draft from, about: each divergence is a mean over K times as many


@torch.inference_mode()
def cache_divergences(
    run: DraftRun, caches: Sequence[OnCache], on_progress: Progress = unseen
) -> list[float]:
    """KL(unrounded ‖ through the cache) in nats of each cache, the mean over rows and depths."""
    every = ((entry, run.rows(entry)) for entry in run.traces.manifest.prompts)
    entries = [(entry, rows) for entry, rows in every if rows]
    draft, sample = run.draft, entries[:: max(1, sum(len(rows) for _, rows in entries) // ROWS)]
    forwards = [draft.forward.caching(cache) for cache in caches]
    totals, count = torch.zeros(len(caches), dtype=torch.float64), 0
    for done, (entry, rows) in enumerate(sample):
        trace = run.traces.load(entry)
        hidden = first_hidden(draft, run.traces, trace)[None]
        token_ids = trace.token_ids[None].to(draft.device)
        wanted = _states(draft.forward, hidden, token_ids, rows, run.num_draft_tokens)
        count += len(rows) * run.num_draft_tokens
        for i, forward in enumerate(forwards):
            got = _states(forward, hidden, token_ids, rows, run.num_draft_tokens)
            totals[i] += sum(map(partial(_divergence, draft.forward), wanted, got))
        on_progress(done + 1, len(sample))
    return [float(total) / count for total in totals]


def _states(
    forward: DraftForward, hidden: Tensor, token_ids: Tensor, rows: range, num_draft_tokens: int
) -> list[Tensor]:
    """[n, D, W] of each pass."""
    passes = forward.passes(hidden, token_ids, rows=rows, num_draft_tokens=num_draft_tokens)
    return [step.hidden.flatten(0, 1) for step in passes]


def _divergence(forward: DraftForward, wanted: Tensor, got: Tensor) -> float:
    """Summed over hidden states [n, D, W], using the logits of some rows at a time."""
    together = max(1, MAX_LOGITS // (forward.num_logits * wanted.shape[1]))
    total = 0.0
    for its, mine in zip(*(torch.split(x, together) for x in (wanted, got)), strict=True):
        p = forward.logits(its).float().log_softmax(-1)
        q = forward.logits(mine).float().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    return total


Ranges = Mapping[int, tuple[float, float | None]]
"""By layer: the largest magnitudes of keys and of values; MLA caches one entry."""


def measure_cache_ranges(run: DraftRun, on_progress: Progress = unseen) -> Ranges:
    """Ranges of all keys and values, in the context and in every later step."""
    draft = run.draft
    layers = cached_layers(draft.weights, draft.name)
    seen: dict[int, list[Tensor | None]] = {layer: [None, None] for layer in layers}

    def watch(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        largest = seen[layer]  # on its device: do not wait for a GPU
        for which, x in enumerate((keys, values)):
            if x.shape[-1]:
                now, before = x.detach().abs().max(), largest[which]
                largest[which] = now if before is None else torch.maximum(before, now)
        return keys, values

    run_over_traces(draft.forward.caching(watch), run, on_progress=on_progress)
    ranges: dict[int, tuple[float, float | None]] = {}
    for layer, (of_keys, of_values) in seen.items():
        if of_keys is None:
            where = run.traces.folder
            raise CalibrationError(
                where,
                f"no continuation is longer than {run.num_draft_tokens} tokens, so no key was kept",
                fix="record longer continuations: --max-new-tokens",
            )
        ranges[layer] = float(of_keys), None if of_values is None else float(of_values)
    return ranges


OCTAVES = range(-3, 8)
"""Candidates: octaves above the smallest power of two that holds the largest magnitude."""
AS_SMALL = 1.01  # times the smallest divergence

Octaves = tuple[int, int]  # of the keys and of the values of all layers


def measure_cache_scales(
    run: DraftRun, *, how: Literal["absmax", "measured"], listener: Listener = SILENT
) -> Mapping[int, CacheScales]:
    """Scales of every layer by its number, from all keys and values that K draft tokens need.

    With MLA, k is the entry's scale, and v the same number.
    """
    with listener.bar("measure keys and values", None, "work") as bar:
        ranges = measure_cache_ranges(run, bar.set)
    if how == "absmax":
        return _by_layer(ranges, lambda largest, _: quotient(largest))
    others = [octave for octave in OCTAVES if octave != 0]
    tried = [(0, 0), *((octave, 0) for octave in others), *((0, octave) for octave in others)]
    if all(values is None for _, values in ranges.values()):
        tried = [(octave, octave) for octave in OCTAVES]
    caches = [CacheRounding(_at(ranges, octaves)) for octaves in tried]
    with listener.bar("draft from rounded keys and values", None, "work") as bar:
        divergences = cache_divergences(run, caches, bar.set)
    return _at(ranges, best_octaves(dict(zip(tried, divergences, strict=True))))


def quotient(largest: float) -> float:
    """The scale that other tools store: largest / 448 in float32; 1 for zero."""
    return float(fp8_scale(torch.tensor(largest, dtype=torch.float32)))


def best_octaves(divergences: Mapping[Octaves, float]) -> Octaves:
    """The middle of the octaves that are as good as the best, for keys and for values.

    `divergences`: for (k, 0) with every k and (0, v) with every v; or only for (k, k).
    """
    if (1, 0) not in divergences:
        both = _middle({k: divergence for (k, _), divergence in divergences.items()})
        return both, both
    of_keys = {k: divergence for (k, v), divergence in divergences.items() if v == 0}
    of_values = {v: divergence for (k, v), divergence in divergences.items() if k == 0}
    return _middle(of_keys), _middle(of_values)


def _middle(divergences: Mapping[int, float]) -> int:
    best = min(divergences.values())
    good = sorted(octave for octave, d in divergences.items() if d <= AS_SMALL * best)
    return good[(len(good) - 1) // 2]


def _at(ranges: Ranges, octaves: Octaves) -> Mapping[int, CacheScales]:
    def scale(largest: float, which: int) -> float:
        return 2.0 ** octaves[which] * octave_above(quotient(largest))

    return _by_layer(ranges, scale)


def _by_layer(ranges: Ranges, scale: Callable[[float, int], float]) -> Mapping[int, CacheScales]:
    return {
        layer: CacheScales(k=(scale(k, 0),), v=(scale(k if v is None else v, 1),))
        for layer, (k, v) in ranges.items()
    }
