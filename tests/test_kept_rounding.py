"""States and codes on the disk: replaced whole, and damage is told; which step is the best."""

import random
from pathlib import Path

import pytest
import torch
from draftquant.calibration.rounding.latents import (
    LatentOptimiser,
    LatentWeight,
    learning_rate_share,
)
from draftquant.calibration.rounding.learned_state import (
    KeptRounding,
    LearningSettings,
    Validation,
    best_of,
    is_over,
)
from draftquant.recipes.errors import CalibrationError
from test_latent_weight import FORMATS, latent

STATE = "state.safetensors"


def seen(step: int, length: float, overlap: float = 0.9) -> Validation:
    """Four prompts alike, so that every difference tells."""
    accepted = (round(100 * (length - 1)),) * 4
    return Validation(
        step=step, rows=(100,) * 4, accepted=accepted, overlap=overlap, unquantized=3.0
    )


@pytest.fixture
def kept(tmp_path: Path) -> KeptRounding:
    return KeptRounding(tmp_path)


def test_a_state_comes_back_as_it_was(kept: KeptRounding, tmp_path: Path) -> None:
    assert (kept.has_state, kept.validations()) == (False, ())
    tensors = {"a.codes": torch.randn(3, 4), "b": torch.zeros(2)}
    kept.save(tensors, (seen(0, 2.5), seen(10, 2.75)))
    assert kept.has_state
    assert kept.validations() == (seen(0, 2.5), seen(10, 2.75))
    found = kept.tensors(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    kept.save({}, (seen(0, 2.5),))  # over: nothing to go on with
    assert kept.tensors({}) == {}
    assert [path.name for path in tmp_path.iterdir()] == [STATE]


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
def test_codes_come_back_as_they_were(name: str, kept: KeptRounding) -> None:
    weights = FORMATS[name]
    latents = {f"layers.{i}.x": latent(weights) for i in (1, 10)}
    kept.save_codes(20, {module: one.parts() for module, one in latents.items()})
    for module, one in latents.items():
        wanted = one.quantized()
        found = kept.codes(20, module, weights.group_size)
        assert torch.equal(found.codes, wanted.codes)
        assert found.scale.dtype == wanted.scale.dtype
        assert torch.equal(found.dequantized(), wanted.dequantized())
    with pytest.raises(CalibrationError, match=r"no learned codes of layers\.1"):
        kept.codes(20, "layers.1", weights.group_size)


def test_codes_without_scales_are_no_linear(kept: KeptRounding) -> None:
    parts = dict(latent(FORMATS["int4"]).parts())
    del parts["scale"]
    kept.save_codes(20, {"x": parts})
    with pytest.raises(CalibrationError, match="no learned codes of x"):
        kept.codes(20, "x", None)


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
    for content, what in (
        (whole[:-1], "truncated"),
        (whole.replace(b'"rounding"', b'"something"'), "not JSON"),
        (whole.replace(b"overlap", b"0verlap"), "unknown key"),
    ):
        (tmp_path / STATE).write_bytes(content)
        with pytest.raises(CalibrationError, match="is not a state of an unfinished run") as caught:
            kept.validations()
        assert what in caught.value.what or what == "not JSON"
        assert caught.value.fix.startswith("rm -r ")
    (tmp_path / STATE).write_bytes(whole)
    for others in ({"b": torch.ones(2)}, {"a": torch.ones(3)}, {}):
        with pytest.raises(CalibrationError, match="other tensors than this draft's"):
            kept.tensors(others)
    kept.save(tensors, ())
    with pytest.raises(CalibrationError, match="no validation"):
        kept.validations()


# ---- the optimiser


def test_an_optimiser_goes_on_where_it_was() -> None:
    name = "int4"
    settings = LearningSettings(steps=6, warmup_steps=2)

    def steps(one: LatentWeight, optimiser: LatentOptimiser, which: range) -> None:
        for step in which:
            served = one.dequantized()
            gradient = torch.randn(served.shape, generator=torch.Generator().manual_seed(step))
            optimiser.step(step, [served], [gradient])

    whole = latent(FORMATS[name])
    steps(whole, LatentOptimiser({"x": whole}, settings), range(6))
    first = latent(FORMATS[name])
    before = LatentOptimiser({"x": first}, settings)
    steps(first, before, range(3))
    state = {n: t.detach().clone() for n, t in before.tensors().items()}
    second = latent(FORMATS[name])
    after = LatentOptimiser({"x": second}, settings)
    assert {n: t.shape for n, t in after.tensors().items()} == {
        n: t.shape for n, t in state.items()
    }
    after.restore(3, state)
    steps(second, after, range(3, 6))
    assert torch.equal(second.codes, whole.codes)
    assert torch.equal(second.dequantized(), whole.dequantized())
    assert not torch.equal(second.codes, latent(FORMATS[name]).codes)


# ---- which step is kept


def test_acceptance_decides_as_far_as_the_prompts_tell() -> None:
    """Sums of 8 more of 1000; by 2 in each prompt, or by 62 in one and by 18 less in the others."""
    settings = LearningSettings()

    def look(step: int, accepted: tuple[int, ...], overlap: float) -> Validation:
        return Validation(
            step=step, rows=(100,) * 4, accepted=accepted, overlap=overlap, unquantized=4.0
        )

    first = look(0, (250, 250, 250, 250), 0.92)
    steady = look(10, (252, 252, 252, 252), 0.918)
    chance = look(10, (312, 232, 232, 232), 0.918)
    assert steady.acceptance_length == chance.acceptance_length == 1 + 1008 / 400
    assert best_of([first, steady], settings).step == 10
    assert best_of([first, chance], settings).step == 0
    assert best_of([first, look(10, chance.accepted, 0.93)], settings).step == 10
    worse = look(10, (247, 248, 247, 248), 0.99)  # as clearly, whatever its overlap
    assert best_of([first, worse], settings).step == 0


def test_the_best_is_the_last_look_or_was_the_best_before() -> None:
    """Only the codes of the best so far are kept: no other may become the best later."""
    draw = random.Random(0)
    settings = LearningSettings(max_overlap_drop=0.02)
    changes = 0
    for _ in range(200):
        looks: list[Validation] = []
        before = None
        for step in range(12):
            accepted = tuple(draw.randrange(240, 261) for _ in range(4))
            looks.append(
                Validation(
                    step=step,
                    rows=(100,) * 4,
                    accepted=accepted,
                    overlap=0.9 + 0.02 * draw.random(),
                    unquantized=4.0,
                )
            )
            best = best_of(looks, settings)
            assert before is None or best in (before, looks[-1])
            changes += best is looks[-1]
            before = best
    assert changes > 400  # of 2400 looks


def test_overlap_must_hardly_fall() -> None:
    settings = LearningSettings(max_overlap_drop=0.01)
    looks = [seen(0, 2.5, 0.9), seen(10, 2.9, 0.889), seen(20, 2.6, 0.8901)]
    assert best_of(looks, settings).step == 20
    assert best_of(looks[:2], settings).step == 0


def test_learning_ends_with_its_steps_or_its_patience() -> None:
    settings = LearningSettings(steps=50, patience=2)
    looks = [seen(0, 2.5), seen(10, 2.75), seen(20, 2.7)]
    assert not is_over(looks, settings)
    assert is_over([*looks, seen(30, 2.7)], settings)
    assert not is_over([*looks, seen(30, 2.8)], settings)
    assert is_over([*looks, seen(30, 2.8), seen(50, 2.9)], settings)


def test_the_learning_rate_rises_and_falls() -> None:
    settings = LearningSettings(steps=100, warmup_steps=10)
    shares = [learning_rate_share(step, settings) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[9]
    assert shares[9] == pytest.approx(0.98, abs=0.01)
    assert shares[50] == pytest.approx(0.5)
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert shares[-1] == 0.01
    assert learning_rate_share(0, LearningSettings(steps=1, warmup_steps=0)) == 1.0
