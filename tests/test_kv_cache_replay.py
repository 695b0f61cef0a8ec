"""Replays of drafts whose keys and values are kept in FP8, and the scales of such a cache."""

import dataclasses
import json
import math

import pytest
import torch
from draftquant.calibration import measured_cache
from draftquant.calibration.linear_inputs.static_scales import run_over_traces
from draftquant.calibration.measured_cache import (
    OCTAVES,
    best_octaves,
    cache_divergences,
    measure_cache_ranges,
    measure_cache_scales,
    octave_above,
)
from draftquant.calibration.passes.draft_inputs import DraftRun, batches_of
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.draft_cache import UNIT, CacheRounding, CacheScales, scale_origin
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes.errors import CalibrationError, CheckpointError, ForwardError
from draftquant.scripts.cli import main
from draftquant.validate.counting.replay_cache import ReplayQuestion
from tied_pair import tied
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_is_replayed_and_judged_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    draft, fp8 = str(tied() / "draft"), ("--kv-cache-dtype", "fp8_e4m3")
    given = ["--traces", str(tied() / "traces"), "-k", "2", "--json", "-q"]
    assert main(["replay", draft, draft, *given, *fp8]) == 0
    plain, served = json.loads(capsys.readouterr().out)
    assert (plain["name"], plain["kv_cache"], plain["cache_scales"]) == ("draft", None, None)
    assert (served["kv_cache"], served["cache_scales"]) == ("fp8_e4m3", "unit")
    assert main(["replay", draft, *given, *fp8]) == 0
    (alone,) = json.loads(capsys.readouterr().out)
    assert alone["prompts"] == served["prompts"]
    assert main(["replay", draft, *given, "--kv-cache-dtype", "auto"]) == 0
    (unrounded,) = json.loads(capsys.readouterr().out)
    assert unrounded["prompts"] == plain["prompts"]

    assert main(["gate", draft, draft, *given, *fp8]) == 3  # three prompts decide nothing
    drafts = json.loads(capsys.readouterr().out)["drafts"]
    kept = [drafts[name]["kv_cache"] for name in ("baseline", "candidate")]
    assert kept == [None, "fp8_e4m3, unit scales"]


def test_what_is_kept_of_one_cache_is_not_taken_for_another() -> None:
    traces = TraceFolder.open(tied() / "traces")

    def key(draft: LoadedDraft) -> object:
        read = {"traces": traces, "batches": batches_of(traces.manifest.prompts, max_tokens=4096)}
        asked = ReplayQuestion(draft=draft, num_draft_tokens=2, temperature=None, **read)
        return asked.key["draft"]

    plain = load_draft(tied() / "draft")
    served = load_draft(tied() / "draft", kv_cache="fp8_e4m3")
    other = plain.with_cache({0: CacheScales(k=(0.5,), v=(1.0,))})
    assert served.cache_scales == {0: UNIT}
    assert len({str(key(draft)) for draft in (plain, served, other)}) == 3
    assert key(load_draft(tied() / "draft")) == key(plain)
    origins = [scale_origin(draft.cache_scales) for draft in (plain, served, other)]
    assert origins == [None, "unit", "stored"]


# ---- scales that are measured


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedDraft, TraceFolder]:
    return load_draft(tied() / "draft"), TraceFolder.open(tied() / "traces")


def shrunk(draft: LoadedDraft, octaves: int) -> LoadedDraft:
    """Values so many octaves smaller, which o_proj makes good: the same draft, bit for bit."""
    weights = dict(draft.weights)
    for name, by in (("v_proj", -octaves), ("o_proj", octaves)):
        name = f"layers.0.self_attn.{name}.weight"
        weights[name] = draft.weights[name] * 2.0**by
    forward = draft.family.forward(draft.geometry, weights, lambda _name, x: x)
    return dataclasses.replace(draft, weights=weights, forward=forward)


def test_ranges_are_those_of_every_key_a_step_keeps(pair: tuple[LoadedDraft, TraceFolder]) -> None:
    draft, traces = pair
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        kept.append((keys.clone(), values.clone()))
        return keys, values

    run_over_traces(draft.forward.caching(keep), DraftRun(draft, traces, 3))
    ((keys, values),) = measure_cache_ranges(DraftRun(draft, traces, 3)).values()
    for i, largest in enumerate((keys, values)):
        assert largest == max(float(both[i].abs().max()) for both in kept)
    tokens = sum(entry.num_tokens for entry in traces.manifest.prompts)
    assert sum(both[0].shape[0] * both[0].shape[2] for both in kept) > tokens  # later steps too
    quotients = measure_cache_scales(DraftRun(draft, traces, 3), how="absmax")
    k, v = ((float(torch.tensor(largest) / 448),) for largest in (keys, values))
    assert quotients == {0: CacheScales(k=k, v=v)}
    assert type(quotients[0].k[0]) is float  # as JSON has it


def test_values_too_small_for_unit_scales_get_scales_that_keep_them(
    pair: tuple[LoadedDraft, TraceFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three candidates each, which are enough for the middle one."""
    monkeypatch.setattr(measured_cache, "OCTAVES", range(3))
    draft, traces = pair
    small = shrunk(draft, 12)
    usual, own = (
        measure_cache_scales(DraftRun(one, traces, 3), how="measured")[0] for one in (draft, small)
    )
    assert (own.k, own.v) == (usual.k, (usual.v[0] * 2.0**-12,))
    assert all(math.frexp(scale)[0] == 0.5 for scale in usual.k + usual.v)  # powers of two
    caches = [CacheRounding({0: UNIT}), CacheRounding({0: own})]
    unit, measured = cache_divergences(DraftRun(small, traces, 3), caches)
    (before,) = cache_divergences(DraftRun(draft, traces, 3), [CacheRounding({0: usual})])
    assert measured == pytest.approx(before, rel=1e-6)
    assert unit > 10 * measured


def test_the_middle_of_what_is_as_good_as_the_best_is_taken() -> None:
    grid = {(k, 0): 1.0 if -1 <= k <= 4 else 1.2 for k in OCTAVES}
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
        measure_cache_scales(DraftRun(holed, traces, 3), how="absmax")
    headless = dataclasses.replace(draft, weights={"lm_head.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match="there is no KV cache"):
        measure_cache_scales(DraftRun(headless, traces, 3), how="measured")
