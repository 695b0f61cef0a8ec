"""The parts of learned rounding: latents, the prompts learned from, what is kept of a run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.rounding.latents import LatentWeight, learning_rate_share
from draftquant.calibration.rounding.learned_state import (
    KeptRounding,
    LearningSettings,
    Validation,
    best_of,
    is_over,
)
from draftquant.calibration.rounding.sequences import (
    MAX_SLOTS,
    MAX_VALIDATION_SLOTS,
    run_together,
    split_prompts,
    training_rows,
    validation_rows,
)
from draftquant.calibration.traces.manifest import TraceEntry
from draftquant.quantize.algorithms import get_algorithm
from draftquant.quantize.numerics.number_formats import FP8_MAX, SMALLEST_E4M3, SMALLEST_SCALE
from draftquant.recipes import Algorithm, WeightFormat
from draftquant.recipes.errors import CalibrationError
from test_numerics import INT4_F16
from test_numerics import some_weight as gaussian
from test_traces import body, plain, saying, written
from weight_formats import INT4, INT4_GROUPS, MXFP4, NVFP4

STATE = "state.safetensors"
FORMATS = {
    "int4": INT4, "int4-groups": INT4_GROUPS, "int4-f16": INT4_F16, "nvfp4": NVFP4, "mxfp4": MXFP4,
}  # fmt: skip
MSE = get_algorithm(Algorithm(scale="mse", rounding="nearest"))
LARGEST = torch.tensor([[6.0]])
"""Of the weight and of those that engines fuse with it."""
each_format = pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)


# ---- latents


def latent(weights: WeightFormat) -> LatentWeight:
    cpu = torch.device("cpu")
    return LatentWeight(gaussian(), weights, MSE, absmax=LARGEST, moments=None, device=cpu)


def moved(weights: WeightFormat) -> LatentWeight:
    """Latents and scales moved at random, as by many steps."""
    one = latent(weights)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        one.codes += torch.randn(one.codes.shape, generator=generator)
        if one.log_scales is not None:
            one.log_scales += 0.3 * torch.randn(one.log_scales.shape, generator=generator)
    return one


@each_format
def test_latents_are_the_codes_and_scales_that_they_stand_for(weights: WeightFormat) -> None:
    """First those of the algorithm, then what is multiplied is what is stored."""
    first = latent(weights).quantized()
    wanted = MSE.quantize(gaussian(), weights, absmax=LARGEST, moments=None)
    assert torch.equal(first.codes, wanted.codes)
    assert first.scale.dtype == wanted.scale.dtype
    assert torch.equal(first.dequantized(), wanted.dequantized())
    one = moved(weights)
    stored = one.quantized()
    assert torch.equal(one.dequantized(), stored.dequantized())
    assert (stored.codes != first.codes).float().mean() > 0.3
    changed = not torch.equal(stored.scale.float(), first.scale.float())
    assert changed is (weights.dtype != "mxfp4")


@each_format
def test_gradients_go_through_both_roundings(weights: WeightFormat) -> None:
    """Of sum(G * code * scale): G * scale for a code, sum of G * code * free scale for its log."""
    one = moved(weights)
    gradient = gaussian(seed=3).float()
    (one.dequantized() * gradient).sum().backward()
    stored = one.quantized()
    # Codes whose value is 1: of INT4 the number itself, of FP4 the third one.
    third = 1 if stored.codes.dtype == torch.int8 else 2
    scale = dataclasses.replace(stored, codes=torch.full_like(stored.codes, third)).dequantized()
    torch.testing.assert_close(one.codes.grad, gradient * scale, rtol=1e-6, atol=0)
    if one.log_scales is None:
        return
    assert one.log_scales.grad is not None
    values = stored.dequantized() / scale
    first = latent(weights).quantized()
    free = first.scale.float() * one.log_scales.detach().exp()
    if first.global_scale is not None:
        free = free * first.global_scale
    wanted = (gradient * values).view(*free.shape, -1).sum(-1) * free
    torch.testing.assert_close(one.log_scales.grad, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "power", "wanted"),
    [(INT4, -60.0, SMALLEST_SCALE), (NVFP4, -60.0, SMALLEST_E4M3), (NVFP4, 60.0, FP8_MAX)],
)
def test_scales_stay_storable(weights: WeightFormat, power: float, wanted: float) -> None:
    one = latent(weights)
    with torch.no_grad():
        assert one.log_scales is not None
        one.log_scales += power
    assert (one.quantized().scale.float() == wanted).all()
    assert torch.equal(one.dequantized(), one.quantized().dequantized())


@pytest.mark.parametrize(("weights", "low", "high"), [(INT4, -8.5, 7.5), (NVFP4, -7, 7)])
def test_latents_beyond_the_codes_come_back(weights: WeightFormat, low: float, high: float) -> None:
    one = latent(weights)
    with torch.no_grad():
        one.codes[0], one.codes[1] = 100.0, -100.0
    one.keep_within_reach()
    assert (one.codes[0] == high).all()
    assert (one.codes[1] == low).all()


# ---- what is learned from, and what is held back

K = 3


def test_a_fifth_of_the_prompts_is_held_back_whatever_their_order_and_names(tmp_path: Path) -> None:
    prompts = plain(20)
    renamed = [dataclasses.replace(trace, id=f"x{trace.id}") for trace in prompts]
    found = []
    for name, each in (("one", prompts), ("other", prompts[::-1]), ("third", renamed)):
        split = split_prompts(written(tmp_path / name, each), K, share=0.2, seed=0)
        sides = [[e.id.removeprefix("x") for e in s] for s in (split.learned, split.held_back)]
        assert [*map(len, sides)] == [16, 4]
        found.append(sides)
    assert found[0] == found[1] == found[2]
    assert {*found[0][0], *found[0][1]} == {f"a{i}" for i in range(20)}
    copies = [saying(f"{n}{i}", body(i)) for i in range(6) for n in "aq"]
    split = split_prompts(written(tmp_path / "copies", copies), K, share=0.2, seed=0)
    held_back = {entry.id[1:] for entry in split.held_back}
    assert held_back.isdisjoint({entry.id[1:] for entry in split.learned})


def entry(num_tokens: int) -> TraceEntry:
    return TraceEntry(id="x", category="a", prompt_length=10, num_tokens=num_tokens, file="f")


@pytest.mark.parametrize(("num_tokens", "per_row"), [(14, 8), (30, 1), (142, 1), (5000, 8)])
def test_rows_are_evenly_spaced_and_few(num_tokens: int, per_row: int) -> None:
    first, last = 9, num_tokens - 1 - K  # rows 9 .. last - 1 have all K predictions
    whole = last - first
    starts = set()
    for draw in range(40):
        rows = training_rows(entry(num_tokens), K, per_row, f"0:{draw}:0")
        assert 1 <= len(rows) * per_row <= max(MAX_SLOTS, per_row)
        assert first <= rows[0] < first + rows.step
        assert rows[-1] < last
        assert rows[-1] + rows.step >= last  # none is left out at the end
        starts.add(rows[0])
    assert (len(starts) > 1) is (whole * per_row > MAX_SLOTS)
    looked = validation_rows(entry(num_tokens), K, per_row)
    assert looked[0] == first
    assert len(looked) * per_row <= MAX_VALIDATION_SLOTS
    if whole * per_row <= MAX_VALIDATION_SLOTS:
        assert looked == range(first, last)


def test_prompts_run_together_where_rows_lie_on_one_grid_and_lengths_are_alike() -> None:
    entries = [entry(n) for n in (100, 90, 300, 85, 80, 110, 95)]
    grids = [range(9, 60), range(9, 50), range(9, 200), range(9, 40), range(10, 50, 2),
             range(11, 80, 2), range(12, 60, 2)]  # fmt: skip
    found = run_together(entries, grids, max_tokens=300)
    assert sorted(map(sorted, found)) == [[0, 1, 3], [2], [4, 6], [5]]
    assert sorted(map(sorted, run_together(entries, grids, max_tokens=200))) == [
        [0], [1, 3], [2], [4, 6], [5]
    ]  # fmt: skip
    assert [len(batch) for batch in run_together(entries, grids, max_tokens=1)] == [1] * 7


# ---- states on the disk


def seen(step: int, length: float, overlap: float = 0.9) -> Validation:
    """Four prompts alike, so that every difference tells."""
    return look(step, (round(100 * (length - 1)),) * 4, overlap, free=3.0)


@pytest.fixture
def kept(tmp_path: Path) -> KeptRounding:
    return KeptRounding(tmp_path)


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
def test_codes_come_back_as_they_were(name: str, kept: KeptRounding) -> None:
    weights = FORMATS[name]
    latents = {f"layers.{i}.x": latent(weights) for i in (1, 10)}
    parts = {module: dict(one.parts()) for module, one in latents.items()}
    kept.save_codes(20, parts)
    for module, one in latents.items():
        wanted, found = one.quantized(), kept.codes(20, module, weights.group_size)
        assert torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.dequantized(), wanted.dequantized())
    del parts["layers.1.x"]["scale"]
    kept.save_codes(30, parts)
    for missing in ("layers.1", "layers.1.x"):
        with pytest.raises(CalibrationError, match=rf"no learned codes of {missing}"):
            kept.codes(30, missing, weights.group_size)


def test_what_a_killed_run_left_unfinished_is_replaced(kept: KeptRounding, tmp_path: Path) -> None:
    kept.save({"a": torch.ones(2)}, (seen(0, 2.0),))
    (tmp_path / f"{STATE}.unfinished").write_bytes(b"half")
    assert kept.validations() == (seen(0, 2.0),)
    kept.save({"a": torch.zeros(2)}, (seen(0, 2.0), seen(1, 2.0)))
    assert len(kept.validations()) == 2
    assert not (tmp_path / f"{STATE}.unfinished").exists()


def test_damage_is_told(kept: KeptRounding, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    kept.save(tensors, (seen(0, 2.0),))
    whole = (tmp_path / STATE).read_bytes()
    other, misspelt = (b'"rounding"', b'"something"'), (b"overlap", b"0verlap")
    for content in (whole[:-1], whole.replace(*other), whole.replace(*misspelt)):
        (tmp_path / STATE).write_bytes(content)
        with pytest.raises(CalibrationError):
            kept.validations()
    (tmp_path / STATE).write_bytes(whole)
    for others in ({"b": torch.ones(2)}, {"a": torch.ones(3)}, {}):
        with pytest.raises(CalibrationError, match="other tensors than this draft's"):
            kept.tensors(others)
    kept.save(tensors, ())
    with pytest.raises(CalibrationError, match="no validation"):
        kept.validations()


# ---- which step is kept


def look(
    step: int, accepted: tuple[int, ...], overlap: float = 0.9, free: float = 4.0
) -> Validation:
    """Of a hundred rows of each prompt."""
    of: dict[str, Any] = {"rows": (100,) * len(accepted), "overlap": overlap, "unquantized": free}
    return Validation(step=step, accepted=accepted, **of)


def test_acceptance_decides_as_far_as_the_prompts_tell() -> None:
    """Sums of 8 more of 1000; by 2 in each prompt, or by 62 in one and by 18 less in the others."""
    settings = LearningSettings()

    first = look(0, (250, 250, 250, 250), 0.92)
    steady = look(10, (252, 252, 252, 252), 0.918)
    chance = look(10, (312, 232, 232, 232), 0.918)
    assert steady.acceptance_length == chance.acceptance_length == 1 + 1008 / 400
    assert best_of([first, steady], settings).step == 10
    assert best_of([first, chance], settings).step == 0
    assert best_of([first, look(10, chance.accepted, 0.93)], settings).step == 10
    # As clearly, whatever its overlap.
    assert best_of([first, look(10, (247, 248, 247, 248), 0.99)], settings).step == 0


def test_overlap_must_hardly_fall_and_learning_ends_with_its_patience() -> None:
    settings = LearningSettings(max_overlap_drop=0.01)
    looks = [seen(0, 2.5, 0.9), seen(10, 2.9, 0.889), seen(20, 2.6, 0.8901)]
    assert best_of(looks, settings).step == 20
    assert best_of(looks[:2], settings).step == 0
    settings = LearningSettings(steps=50, patience=2)
    looks = [seen(0, 2.5), seen(10, 2.75), seen(20, 2.7)]
    assert not is_over(looks, settings)
    assert is_over([*looks, seen(30, 2.7)], settings)
    assert not is_over([*looks, seen(30, 2.8)], settings)
    assert is_over([*looks, seen(30, 2.8), seen(50, 2.9)], settings)
    settings = LearningSettings(steps=100, warmup_steps=10)
    shares = [learning_rate_share(step, settings) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[9] == pytest.approx(0.98, abs=0.01)
    assert shares[50] == pytest.approx(0.5)
    assert shares[9:] == sorted(shares[9:], reverse=True)
