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


GROUPS_OF_32 = """\
extends: int4-group128
name: int4-group32
weights: {group_size: 32}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block draft: its widths are whole groups."""
    folder = tmp_path_factory.mktemp("vendors") / "dflash"
    make_pair(folder, "dflash", num_prompts=4)
    (folder / "int4-group32.yaml").write_text(GROUPS_OF_32, encoding="utf-8")
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of the toolkits really runs, as it runs."""
    found: list[str] = []

    def watch(owner: Any, method: str, name: str) -> None:
        real = getattr(owner, method)

        def watched(*args: Any, **options: Any) -> Any:
            found.append(name)
            return real(*args, **options)

        monkeypatch.setattr(owner, method, watched)

    pytest.importorskip("modelopt")
    pytest.importorskip("quark")
    from draftquant.quantize.backends.quark_backend import quark_process_state
    from modelopt.torch.quantization.calib.mse import MseCalibrator
    from modelopt.torch.quantization.utils.calib_utils import GPTQHelper

    with quark_process_state():
        from quark.torch.algorithm.gptq.gptq import GPTQ as QUARKS

    watch(QUARKS, "quantize", "Quark's GPTQ")
    watch(GPTQHelper, "update_weights", "ModelOpt's GPTQ")
    watch(MseCalibrator, "compute_amax", "ModelOpt's search")
    return found


COMMANDS = {
    "quark-int4-channel": ("mi325x-w4a8", "quark", "gptq", "Quark's GPTQ", "amd-quark"),
    "quark-int4-carried": ("mi325x-w4a8-fp8", "quark", "gptq", "Quark's GPTQ", "amd-quark"),
    "quark-int4-groups": ("int4-group32", "quark", "gptq", "Quark's GPTQ", "amd-quark"),
    "quark-mxfp4": ("mi355-mxfp4", "quark", "gptq", "Quark's GPTQ", "amd-quark"),
    "quark-fp8": ("mi325x-fp8", "quark", "gptq", "Quark's GPTQ", "amd-quark"),
    "modelopt-fp8-gptq": ("blackwell-fp8", "modelopt", "gptq", "ModelOpt's GPTQ",
                          "nvidia-modelopt"),
    "modelopt-fp8-mse": ("blackwell-fp8-mla", "modelopt", "mse", "ModelOpt's search",
                         "nvidia-modelopt"),
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.vendor
@needs("quark")
@needs("modelopt")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_draft_is_quantized_verified_and_replayed(
    command: str, folder: Path, tmp_path: Path, calls: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    recipe, backend, algorithm, ran, package = COMMANDS[command]
    own = folder / f"{recipe}.yaml"
    recipe = str(own) if own.exists() else recipe
    measured = algorithm == "gptq"
    given = ("--recipe", recipe, "--backend", backend, "--algorithm", algorithm)
    traces = ("--traces", str(folder / "traces"), "--target", str(folder / "target"))
    for out in ("a", "b"):
        made = ["quantize", str(folder / "draft"), "--out", str(tmp_path / out), *given]
        assert main(made + list(traces) * measured) == 0, capsys.readouterr().err
    searches = 2 if ran == "ModelOpt's search" else 1  # it asks for its result twice
    report = verify(tmp_path / "a", folder / "draft")
    linears = len(report.linears)
    assert linears > 7
    assert calls == [ran] * (2 * linears * searches)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    assert report.ok, report.faults
    scales = "scales of a search around absmax" if algorithm == "mse" else "exact absmax scales"
    codes = "quantized values with at most 4 times the error of the nearest"
    codes = codes if measured else "exactly the nearest quantized values"
    assert report.rule == f"{scales}, {codes}"
    record = json.loads((tmp_path / "a" / "draftquant.json").read_text(encoding="utf-8"))
    assert package in record["backend_versions"]
    assert record["recipe"]["backend"] == backend
    scale, rounding = ("absmax", "gptq") if measured else ("mse", "nearest")
    assert record["recipe"]["algorithm"]["scale"] == scale
    assert record["recipe"]["algorithm"]["rounding"] == rounding
    assert len(record.get("calibration_prompts", ())) == (4 if measured else 0)
    assert main(["replay", str(folder / "draft"), str(tmp_path / "a"), *traces]) == 0
