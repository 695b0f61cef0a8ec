"""GPTQ of weights that make up for the rounding of their inputs: against its definition."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.algorithms.algorithm import MOST_CHANGED
from draftquant.quantize.verify import verify
from draftquant.recipes import Algorithm, load_recipe, recipe_sha256
from draftquant.recipes.chosen_recipe import RecipeChoice, chosen_recipe
from draftquant.recipes.errors import RecipeError
from draftquant.recipes.schema import WeightFormat
from draftquant.scripts.cli import main
from gptq_textbook import gaussian, inputs, moments_of
from tied_pair import tied
from tiny import read_tensors
from torch import Tensor
from verify_cases import Tensors, edit

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


def test_the_corrected_weight_is_that_of_its_definition() -> None:
    """(W C + d W) (H + d I)^-1, with C of inputs before and after rounding."""
    x, rounded = rounded_inputs(96)
    rounded = x + (rounded - x) / 8
    w = gaussian(8, 96)
    c, h = (t.double().T @ rounded.double() / len(x) for t in (x, rounded))
    damping = 0.01 * h.diagonal().mean()
    wide = w.double()
    exact = (wide @ c + damping * wide) @ torch.linalg.inv(h + damping * torch.eye(96))
    lost = (x - rounded).T @ rounded / len(x)
    moments = InputMoments(moments_of(rounded).mean, lost=lost)
    assert (moments.corrected(w) - exact).norm() < 1e-4 * (exact - wide).norm()
    assert (exact - wide).norm() > 0.01 * wide.norm()


def test_no_row_goes_further_than_verify_allows() -> None:
    """However much the inputs ask for: the change keeps its direction."""
    x, rounded = rounded_inputs(96)
    w, mean = gaussian(8, 96), moments_of(rounded).mean
    lost = (x - rounded).T @ rounded / len(x)
    weak, strong = (InputMoments(mean, lost=lost * f).corrected(w) - w for f in (0.01, 100.0))
    assert torch.allclose(strong.norm(dim=1), MOST_CHANGED * w.norm(dim=1))
    assert (torch.cosine_similarity(weak, strong) > 0.999).all()


def test_of_few_inputs_less_is_believed() -> None:
    x, rounded = rounded_inputs(96)
    w, changes, used = gaussian(8, 96), [], []
    for damping in (0.01, 0.5):
        lost = (x - rounded).T @ rounded / len(x) / 8
        moments = InputMoments(
            moments_of(rounded).mean, lost=lost, damping=damping, on_factor=used.append
        )
        changes.append(float((moments.corrected(w) - w).norm()))
    assert used == [0.01, 0.5]
    assert changes[1] < 0.8 * changes[0]


def test_rounding_that_takes_nothing_changes_nothing() -> None:
    """Of moments without what is lost, the weight goes to GPTQ bit for bit."""
    w, mean = gaussian(8, 96).bfloat16(), moments_of(inputs(96)).mean
    assert torch.equal(InputMoments(mean).corrected(w), w.float())
    w[3] = 0  # a row of which no share can be taken
    unchanged = InputMoments(mean, lost=torch.zeros_like(mean))
    assert torch.equal(unchanged.corrected(w), w.float())


@pytest.mark.parametrize(
    ("recipe", "algorithm", "asked", "found"),
    [
        ("blackwell-nvfp4", "gptq", None, "auto"),
        ("mi325x-w4a8", "gptq", None, "off"),  # to FP8: nothing to win
        ("blackwell-nvfp4-learned", None, "off", "off"),
        ("blackwell-nvfp4-learned", "mse", None, "off"),
    ],
)
def test_the_command_line_corrects_where_it_pays(
    recipe: str, algorithm: str | None, asked: str | None, found: str
) -> None:
    chosen = chosen_recipe(RecipeChoice(recipe, None, algorithm, asked))  # type: ignore[arg-type]
    assert chosen.algorithm.input_correction == found


def test_what_cannot_correct_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="rounding nearest measures nothing of the inputs"):
        chosen_recipe(RecipeChoice("blackwell-nvfp4", input_correction="auto"))
    with pytest.raises(RecipeError, match=r"only draftquant's own backend \(torch\) corrects"):
        chosen_recipe(RecipeChoice("mi355-mxfp4", "quark", "gptq", "auto"))
    assert chosen_recipe(RecipeChoice("mi355-mxfp4", "quark", "gptq")).backend == "quark"
    file = tmp_path / "own.yaml"
    own = "extends: fp8-ptpc\nname: own\nalgorithm: {input_correction: auto}\n"
    file.write_text(own, encoding="utf-8")
    with pytest.raises(RecipeError, match="input_correction: leave it out"):
        load_recipe(file)


def test_records_of_recipes_without_it_keep_their_hash() -> None:
    """As version 0.2.0 wrote it."""
    recipe = chosen_recipe(RecipeChoice("blackwell-nvfp4", None, "gptq", "off"))
    assert recipe_sha256(recipe) == HASH_OF_0_2
    corrected = dataclasses.replace(recipe, algorithm=CORRECTED)
    assert recipe_sha256(corrected) != HASH_OF_0_2
    assert CORRECTED.to_nearest == GPTQ.to_nearest


HASH_OF_0_2 = "9b798fa607c4df3cf4dcbac504769b76570a1850958f9f9e935a12d7c8e1c0f6"
"""Of blackwell-nvfp4 with --algorithm gptq."""


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft, and beside it what NVFP4 with corrected weights makes of it."""
    folder = tmp_path_factory.mktemp("corrected")
    for name in ("draft", "traces"):
        (folder / name).symlink_to(tied() / name)
    assert main([
        "quantize", str(folder / "draft"), "--recipe", "blackwell-nvfp4", "--algorithm", "gptq",
        "--traces", str(folder / "traces"), "--out", str(folder / "out"),
    ]) == 0  # fmt: skip
    return folder


def test_the_record_says_how_far_the_inputs_were_believed(folder: Path) -> None:
    record = json.loads((folder / "out" / "draftquant.json").read_text(encoding="utf-8"))
    assert record["recipe"]["algorithm"]["input_correction"] == "auto"
    found = record["gptq"]["input_correction"]
    assert len(found) == 7
    assert "damping" not in record["gptq"]  # nothing was raised
    by_layer = {name.rpartition(".")[2]: damping for name, damping in found.items()}
    assert by_layer["q_proj"] == by_layer["k_proj"] > by_layer["gate_proj"] > 0.01  # 128, 64 inputs


def test_few_prompts_are_said_before_anything_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--traces", str(folder / "traces"), "--out", str(tmp_path / "out"))
    arguments = ("--recipe", "blackwell-nvfp4", "--algorithm", "gptq", *out)
    assert main(["quantize", str(folder / "draft"), *arguments]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "input correction: 4 prompts give at least 252 inputs for the 128 columns of" in said
    assert "about 66 prompts like these" in said
    assert main(["quantize", str(folder / "draft"), *arguments[:-1], str(tmp_path / "off"),
                 "--input-correction", "off"]) == 0  # fmt: skip
    assert "input correction" not in capsys.readouterr().err


def permuted(packed: np.ndarray[Any, Any]) -> None:
    packed[:] = np.roll(packed, 1, axis=0)


def doubled(packed: np.ndarray[Any, Any]) -> None:
    """Magnitudes 1, 2, 3 for 0.5, 1, 1.5: the next two codes."""
    codes = np.stack([packed & 7, packed >> 4 & 7])
    bigger = np.where((codes > 0) & (codes < 5), codes + 2, codes)
    packed[:] = packed & 0x88 | bigger[0] | bigger[1] << 4


@pytest.mark.parametrize("attack", [permuted, doubled])
def test_verify_sees_what_correction_never_does(
    attack: Callable[[np.ndarray[Any, Any]], None], folder: Path, tmp_path: Path
) -> None:
    """Beside the digest, which whoever changes a folder can write anew."""
    out = tmp_path / "out"
    shutil.copytree(folder / "out", out)
    name = next(name for name in read_tensors(out) if name.endswith("up_proj.weight"))

    def change(tensors: Tensors) -> None:
        stored = tensors[name]
        packed = np.frombuffer(stored.data, np.uint8).reshape(stored.shape).copy()
        attack(packed)
        tensors[name] = stored._replace(data=packed.tobytes())

    edit(out, change)
    faults = [fault for fault in verify(out, folder / "draft").faults if fault.where == name]
    assert ["quantized values with at most" in fault.expected for fault in faults] == [True]
