"""Scales of a draft's KV cache: against an observer that keeps every key, and what is chosen."""

import dataclasses
import math

import pytest
import torch
from draftquant.calibration.linear_inputs.static_scales import run_over_traces
from draftquant.calibration.measured_cache import (
    OCTAVES,
    best_octaves,
    cache_divergences,
    measure_cache_ranges,
    measure_cache_scales,
    octave_above,
)
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.draft_cache import UNIT, CacheRounding, CacheScales
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes.errors import CalibrationError, CheckpointError, ForwardError
from tied_pair import tied
from torch import Tensor

K = 3


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedDraft, TraceFolder]:
    return load_draft(tied() / "draft"), TraceFolder.open(tied() / "traces")


def shrunk(draft: LoadedDraft, octaves: int) -> LoadedDraft:
    """Values so many octaves smaller, which o_proj makes good: the same draft, bit for bit."""
    weights = dict(draft.weights)
    weights["layers.0.self_attn.v_proj.weight"] = (
        draft.weights["layers.0.self_attn.v_proj.weight"] * 2.0**-octaves
    )
    weights["layers.0.self_attn.o_proj.weight"] = (
        draft.weights["layers.0.self_attn.o_proj.weight"] * 2.0**octaves
    )
    forward = draft.family.forward(draft.geometry, weights, lambda _name, x: x)
    return dataclasses.replace(draft, weights=weights, forward=forward)


def test_ranges_are_those_of_every_key_that_any_step_keeps(
    pair: tuple[LoadedDraft, TraceFolder],
) -> None:
    draft, traces = pair
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        kept.append((keys.clone(), values.clone()))
        return keys, values

    run_over_traces(draft.forward.caching(keep), DraftRun(draft, traces, K))
    ((keys, values),) = measure_cache_ranges(DraftRun(draft, traces, K)).values()
    for i, largest in enumerate((keys, values)):
        assert largest == max(float(both[i].abs().max()) for both in kept)
    tokens = sum(entry.num_tokens for entry in traces.manifest.prompts)
    assert sum(both[0].shape[0] * both[0].shape[2] for both in kept) > tokens  # later steps too
    quotients = measure_cache_scales(DraftRun(draft, traces, K), how="absmax")
    assert quotients == {
        0: CacheScales(k=(float(torch.tensor(keys) / 448),), v=(float(torch.tensor(values) / 448),))
    }


@pytest.mark.slow
def test_values_too_small_for_unit_scales_get_scales_that_keep_them(
    pair: tuple[LoadedDraft, TraceFolder],
) -> None:
    draft, traces = pair
    small = shrunk(draft, 12)
    usual, own = (
        measure_cache_scales(DraftRun(one, traces, K), how="measured")[0] for one in (draft, small)
    )
    assert own.k == usual.k
    assert own.v == (usual.v[0] * 2.0**-12,)
    assert all(math.frexp(scale)[0] == 0.5 for scale in usual.k + usual.v)  # powers of two
    caches = [CacheRounding({0: UNIT}), CacheRounding({0: own})]
    unit, measured = cache_divergences(DraftRun(small, traces, K), caches)
    (before,) = cache_divergences(DraftRun(draft, traces, K), [CacheRounding({0: usual})])
    assert measured == pytest.approx(before, rel=1e-6)
    assert unit > 10 * measured


def test_the_middle_of_what_is_as_good_as_the_best_is_taken() -> None:
    grid = {(k, 0): 1.0 if -1 <= k <= 3 else 1.2 for k in OCTAVES}
    grid |= {(0, v): 1.005 if v < 0 else (0.999 if v == 2 else 1.1) for v in OCTAVES if v}
    assert best_octaves(grid) == (1, -1)
    assert best_octaves({(k, k): float(abs(k - 2)) + 1 for k in OCTAVES}) == (2, 2)
    assert [octave_above(x) for x in (0.0, 0.25, 0.26, 3.0)] == [1.0, 0.25, 0.5, 4.0]


def test_what_cannot_be_measured_is_an_error(pair: tuple[LoadedDraft, TraceFolder]) -> None:
    draft, traces = pair
    with pytest.raises(CalibrationError, match="no continuation is longer than 40 tokens"):
        measure_cache_scales(DraftRun(draft, traces, 40), how="absmax")
    holed = shrunk(draft, 0)
    holed.weights["layers.0.self_attn.v_proj.weight"][0, 0] = torch.inf
    with pytest.raises(ForwardError, match="hidden states are NaN or infinite"):
        measure_cache_scales(DraftRun(holed, traces, K), how="absmax")
    headless = dataclasses.replace(draft, weights={"lm_head.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match="there is no KV cache"):
        measure_cache_scales(DraftRun(headless, traces, K), how="measured")
