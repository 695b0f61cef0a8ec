"""GPTQ of weights that make up for the rounding of their inputs: against its definition."""

import dataclasses
from pathlib import Path

import pytest
import torch
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.backends import get_backend
from draftquant.recipes import Algorithm, load_recipe, recipe_sha256
from draftquant.recipes.errors import RecipeError
from draftquant.recipes.schema import WeightFormat
from draftquant.scripts.api.opening import chosen_recipe
from gptq_textbook import gaussian, inputs, moments_of
from torch import Tensor

NVFP4 = WeightFormat(dtype="nvfp4", granularity="group", symmetric=True, group_size=16)
GPTQ = Algorithm(scale="mse", rounding="gptq")
CORRECTED = dataclasses.replace(GPTQ, input_correction="auto")


def rounded_inputs(columns: int) -> tuple[Tensor, Tensor]:
    """Inputs that depend on each other, and what a coarse rounding makes of them."""
    x = inputs(columns, 1200)
    step = x.abs().amax(dim=1, keepdim=True) / 3
    return x, (x / step).round() * step


def corrected_moments(x: Tensor, rounded: Tensor, *, precise: bool = False) -> InputMoments:
    lost = (x - rounded).T @ rounded / len(x)
    return InputMoments(moments_of(rounded).mean, lost=lost, precise=precise)


@pytest.mark.parametrize("precise", [False, True])
def test_the_corrected_weight_is_that_of_its_definition(precise: bool) -> None:
    """(W C + d W) (H + d I)^-1, with C of inputs before and after rounding."""
    x, rounded = rounded_inputs(96)
    w = gaussian(8, 96)
    c, h = (t.double().T @ rounded.double() / len(x) for t in (x, rounded))
    damping = 0.01 * h.diagonal().mean()
    wide = w.double()
    exact = (wide @ c + damping * wide) @ torch.linalg.inv(h + damping * torch.eye(96))
    moments = corrected_moments(x, rounded, precise=precise)
    assert (moments.corrected(w) - exact).norm() < 1e-4 * (exact - wide).norm()
    assert (exact - wide).norm() > 0.05 * wide.norm()


def test_rounding_that_takes_nothing_changes_nothing() -> None:
    """Of moments without what is lost, the weight goes to GPTQ bit for bit."""
    w, mean = gaussian(8, 96).bfloat16(), moments_of(inputs(96)).mean
    assert torch.equal(InputMoments(mean).corrected(w), w.float())
    unchanged = InputMoments(mean, lost=torch.zeros_like(mean))
    assert torch.equal(unchanged.corrected(w), w.float())


def test_outputs_come_closer_to_those_of_unrounded_inputs() -> None:
    """On inputs that were not measured as well."""
    w = gaussian(48, 96).bfloat16()
    x, rounded = (t.split(800) for t in rounded_inputs(96))
    found = {}
    for lost, moments in (
        ("ignored", moments_of(rounded[0])),
        ("made up for", corrected_moments(x[0], rounded[0])),
    ):
        codes = get_backend("torch", GPTQ).quantize(w, NVFP4, None, moments)
        served = codes.dequantized()
        errors = (rounded[1] @ served.T - x[1] @ w.float().T).square().mean()
        found[lost] = float(errors)
    assert found["made up for"] < 0.9 * found["ignored"]


@pytest.mark.parametrize(
    ("recipe", "algorithm", "asked", "found"),
    [
        ("blackwell-nvfp4", "gptq", None, "auto"),
        ("mi355-mxfp4", "learned", None, "auto"),
        ("int4-channel", "gptq", None, "off"),  # no input is rounded: the recipe is as before
        ("hopper-w4a8", "gptq", None, "off"),  # to FP8: nothing to win
        ("blackwell-nvfp4", "gptq", "off", "off"),
        ("blackwell-nvfp4-learned", None, None, "auto"),
        ("blackwell-nvfp4-learned", None, "off", "off"),
        ("blackwell-nvfp4-learned", "mse", None, "off"),
    ],
)
def test_the_command_line_corrects_where_it_pays(
    recipe: str, algorithm: str | None, asked: str | None, found: str
) -> None:
    chosen = chosen_recipe(recipe, algorithm=algorithm, input_correction=asked)  # type: ignore[arg-type]
    assert chosen.algorithm.input_correction == found


def test_what_cannot_correct_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="rounding nearest measures nothing of the inputs"):
        chosen_recipe("blackwell-nvfp4", input_correction="auto")
    with pytest.raises(RecipeError, match=r"only draftquant's own backend \(torch\) corrects"):
        chosen_recipe("mi355-mxfp4", backend="quark", algorithm="gptq", input_correction="auto")
    assert chosen_recipe("mi355-mxfp4", backend="quark", algorithm="gptq").backend == "quark"
    file = tmp_path / "own.yaml"
    own = "extends: fp8-ptpc\nname: own\nalgorithm: {input_correction: auto}\n"
    file.write_text(own, encoding="utf-8")
    with pytest.raises(RecipeError, match="input_correction: leave it out"):
        load_recipe(file)


def test_records_of_recipes_without_it_keep_their_hash() -> None:
    """As version 0.2.0 wrote it."""
    recipe = chosen_recipe("blackwell-nvfp4", algorithm="gptq", input_correction="off")
    assert recipe_sha256(recipe) == HASH_OF_0_2
    corrected = dataclasses.replace(recipe, algorithm=CORRECTED)
    assert recipe_sha256(corrected) != HASH_OF_0_2
    assert CORRECTED.to_nearest == GPTQ.to_nearest


HASH_OF_0_2 = "9b798fa607c4df3cf4dcbac504769b76570a1850958f9f9e935a12d7c8e1c0f6"
"""Of blackwell-nvfp4 with --algorithm gptq."""
