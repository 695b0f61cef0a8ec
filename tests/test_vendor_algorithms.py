"""Vendors' own GPTQ and search: codes against slow references, folders against verify."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.backends import get_backend
from draftquant.quantize.numerics.quantized_weight import code_values
from draftquant.quantize.verify import verify
from draftquant.recipes import Algorithm, WeightFormat
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import BackendName
from draftquant.scripts.cli import main
from gptq_textbook import gaussian, inputs, moments_of, textbook
from rounding_pairs import make_pair
from torch import Tensor
from vendors import needs
from weight_formats import FP8_CHANNEL, FP8_TENSOR, INT4, INT4_GROUPS, MXFP4, NVFP4, TWO_STAGES

pytestmark = pytest.mark.slow

GPTQ = Algorithm(scale="absmax", rounding="gptq")
MSE = Algorithm(scale="mse", rounding="nearest")


def case(name: BackendName, weights: WeightFormat) -> Any:
    label = f"{name}-{weights.dtype}-{weights.granularity}"
    return pytest.param(name, weights, marks=[pytest.mark.vendor, needs(name)], id=label)


GPTQ_FORMATS = [
    *(case("quark", w) for w in (INT4, INT4_GROUPS, FP8_CHANNEL, FP8_TENSOR, MXFP4)),
    *(case("modelopt", w) for w in (FP8_CHANNEL, FP8_TENSOR)),
]


# ---- GPTQ


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "weights"), GPTQ_FORMATS)
def test_codes_are_those_of_the_textbook(
    name: BackendName, weights: WeightFormat, dtype: torch.dtype
) -> None:
    """160 columns, more than one block; damping of 1 %; Quark orders columns, ModelOpt does not."""
    w, x = gaussian(24, 160).to(dtype), inputs(160)
    before = w.clone()
    found = get_backend(name, GPTQ).quantize(w, weights, None, moments_of(x))
    assert torch.equal(w, before)
    nearest = get_backend("torch").quantize(w, weights)
    assert found.scale.dtype == nearest.scale.dtype
    assert torch.equal(found.scale, nearest.scale)
    assert found.codes.dtype == nearest.codes.dtype
    wanted = textbook(w.float(), weights, found, x, ordered=name == "quark")
    # Where float32 and float64 fall on two sides of a middle, the columns after it differ too.
    same = code_values(found.codes) == code_values(wanted)
    assert same.float().mean() > 0.97
    assert same.all(dim=1).float().mean() > 0.6
    other = textbook(w.float(), weights, found, x, ordered=name != "quark")
    assert (code_values(found.codes) == code_values(other)).float().mean() < 0.95


# ---- ModelOpt's search


@pytest.mark.vendor
@needs("modelopt")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_modelopt_finds_the_best_of_the_recipes_factors(dtype: torch.dtype) -> None:
    w = gaussian(24, 96).to(dtype)
    found = get_backend("modelopt", MSE).quantize(w, FP8_CHANNEL)
    absmax = get_backend("torch").quantize(w, FP8_CHANNEL).scale

    def lost(scale: Tensor) -> Tensor:
        codes = (w.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return (codes * scale - w.float()).double().square().sum(dim=1, keepdim=True)

    tried = torch.stack([lost(absmax * (i / 32)) for i in range(8, 33)])
    assert torch.allclose(lost(found.scale), tried.min(dim=0).values, rtol=1e-4)
    ratio = found.scale / absmax
    assert (ratio < 0.99).any()
    assert (ratio >= 0.25).all()
    assert (ratio <= 1).all()
    ours = get_backend("torch", MSE).quantize(w, FP8_CHANNEL)
    assert torch.allclose(lost(ours.scale), lost(found.scale), rtol=1e-4)


# ---- what a toolkit's algorithm cannot do


NOT_THESE: list[tuple[BackendName, Algorithm, WeightFormat, str]] = [
    ("quark", GPTQ, TWO_STAGES, "expected weights that are rounded once"),
    ("modelopt", GPTQ, NVFP4, "in Triton kernels, on CUDA alone"),
    ("modelopt", MSE, NVFP4, "in Triton kernels, on CUDA alone"),
    ("modelopt", MSE, FP8_TENSOR, "searches one for each weight alone"),
    ("modelopt", GPTQ, INT4, "this backend does not compute"),
]


@pytest.mark.parametrize(("name", "algorithm", "weights", "message"), NOT_THESE)
def test_formats_that_an_algorithm_does_not_take_are_refused(
    name: BackendName, algorithm: Algorithm, weights: WeightFormat, message: str
) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        get_backend(name, algorithm).check(weights)
    assert "backend: torch" in caught.value.fix


@pytest.mark.vendor
@needs("modelopt")
def test_a_factor_that_modelopt_does_not_find_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so on stdout, and goes on with the nearest codes."""
    monkeypatch.setattr(InputMoments, "as_inputs", torch.full((32, 32), torch.nan))
    with pytest.raises(BackendError, match="went on with the nearest codes"):
        get_backend("modelopt", GPTQ).quantize(
            gaussian(8, 32), FP8_CHANNEL, None, InputMoments(torch.eye(32))
        )


# ---- the command


@pytest.mark.vendor
@needs("quark")
@needs("modelopt")
@pytest.mark.parametrize(
    ("recipe", "backend", "algorithm"),
    [("mi325x-w4a8-fp8", "quark", "gptq"), ("blackwell-fp8-mla", "modelopt", "mse")],
)
def test_a_draft_is_quantized_and_verified(
    recipe: str, backend: str, algorithm: str, tmp_path: Path
) -> None:
    make_pair(tmp_path, "dflash", num_prompts=4)
    draft, out, argv = tmp_path / "draft", tmp_path / "out", ["--algorithm", algorithm]
    if algorithm == "gptq":
        argv += ["--traces", str(tmp_path / "traces"), "--target", str(tmp_path / "target")]
    argv += ["--recipe", recipe, "--backend", backend, "--out", str(out)]
    assert main(["quantize", str(draft), *argv]) == 0
    report = verify(out, draft)
    assert report.ok, report.faults
    wanted = "a search around absmax" if algorithm == "mse" else "4 times the error of the nearest"
    assert wanted in report.rule
    record = json.loads((out / "draftquant.json").read_text(encoding="utf-8"))
    assert record["recipe"]["backend"] == backend
    assert len(record.get("calibration_prompts", ())) == (4 if algorithm == "gptq" else 0)
