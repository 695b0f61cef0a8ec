"""Vendors' own GPTQ and search: codes against slow references, folders against verify."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.algorithms.algorithm import DAMPINGS
from draftquant.quantize.backends import get_backend
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight, code_values
from draftquant.quantize.verify import verify
from draftquant.recipes import Algorithm, WeightFormat
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import BackendName
from draftquant.scripts.cli import main
from gptq_textbook import gaussian, inputs, moments_of, textbook
from rounding_pairs import make_pair
from test_vendor_differential import EDGES, in_whole_groups
from torch import Tensor
from vendors import needs

pytestmark = pytest.mark.slow

GPTQ = Algorithm(scale="absmax", rounding="gptq")
MSE = Algorithm(scale="mse", rounding="nearest")
INT4 = WeightFormat(dtype="int4", granularity="channel", symmetric=True)
INT4_GROUPS = WeightFormat(dtype="int4", granularity="group", group_size=32, symmetric=True)
FP8_CHANNEL = WeightFormat(dtype="fp8_e4m3", granularity="channel", symmetric=True)
FP8_TENSOR = WeightFormat(dtype="fp8_e4m3", granularity="tensor", symmetric=True)
MXFP4 = WeightFormat(dtype="mxfp4", granularity="group", group_size=32, symmetric=True)
NVFP4 = WeightFormat(dtype="nvfp4", granularity="group", group_size=16, symmetric=True)
TWO_STAGES = WeightFormat(
    dtype="int4", granularity="channel", symmetric=True, first_stage="fp8_e4m3"
)


def case(name: BackendName, weights: WeightFormat) -> Any:
    label = f"{name}-{weights.dtype}-{weights.granularity}"
    return pytest.param(name, weights, marks=[pytest.mark.vendor, needs(name)], id=label)


GPTQ_FORMATS = [
    *(case("quark", w) for w in (INT4, INT4_GROUPS, FP8_CHANNEL, FP8_TENSOR, MXFP4)),
    *(case("modelopt", w) for w in (FP8_CHANNEL, FP8_TENSOR)),
]


def output_error(found: QuantizedWeight, w: Tensor, x: Tensor) -> float:
    return float(((found.dequantized() - w.float()) @ x.T).square().sum())


# ---- inputs that stand for moments


def test_inputs_have_the_damped_moments() -> None:
    moments = moments_of(inputs(96))
    rows = moments.as_inputs
    assert rows.shape == (96, 96)
    assert rows.dtype == torch.float32
    wanted = moments.mean + DAMPINGS[0] * moments.squares.mean() * torch.eye(96)
    scale = wanted.diagonal().sqrt()
    error = (rows.T @ rows / len(rows) - wanted) / scale[:, None] / scale
    assert error.abs().max() < 1e-5
    assert moments.as_inputs is rows


@pytest.mark.parametrize("number", [0, 1, 5])
def test_fewer_inputs_than_features_still_have_a_factor(number: int) -> None:
    x = inputs(64)[:number]
    rows = InputMoments(x.T @ x / max(1, number)).as_inputs
    assert rows.isfinite().all()
    assert (rows.square().sum(dim=0) > 0).all()  # Quark zeroes the columns of inputs that are 0


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


@pytest.mark.parametrize(("name", "weights"), GPTQ_FORMATS)
def test_outputs_come_closer(name: BackendName, weights: WeightFormat) -> None:
    w, x = gaussian(32, 96).bfloat16(), inputs(96)
    found = get_backend(name, GPTQ).quantize(w, weights, None, moments_of(x))
    nearest = get_backend("torch").quantize(w, weights)
    assert output_error(found, w, x) < 0.5 * output_error(nearest, w, x)


@pytest.mark.vendor
@needs("quark")
@pytest.mark.parametrize("weights", [INT4, INT4_GROUPS, MXFP4], ids=str)
def test_quark_finds_the_codes_of_our_own_gptq(weights: WeightFormat) -> None:
    w, x = gaussian(24, 160).bfloat16(), inputs(160)
    theirs, ours = (
        get_backend(name, GPTQ).quantize(w, weights, None, moments_of(x))
        for name in ("quark", "torch")
    )
    assert (code_values(theirs.codes) == code_values(ours.codes)).float().mean() > 0.99


@pytest.mark.each_value
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("name", "weights"), GPTQ_FORMATS)
def test_scales_of_edge_values_are_those_of_absmax(
    name: BackendName, weights: WeightFormat, edge: str
) -> None:
    w = in_whole_groups(EDGES[edge](torch.bfloat16).bfloat16().contiguous(), weights)
    x = inputs(w.shape[1])
    found = get_backend(name, GPTQ).quantize(w, weights, None, moments_of(x))
    nearest = get_backend("torch").quantize(w, weights)
    assert torch.equal(found.scale, nearest.scale)
    assert code_values(found.codes).isfinite().all()


@pytest.mark.parametrize(("name", "weights"), GPTQ_FORMATS)
def test_an_input_that_is_never_read_does_not_zero_its_weights(
    name: BackendName, weights: WeightFormat
) -> None:
    """Quark's own treatment of a column whose inputs were all zero; the next prompt may read it."""
    w, x = gaussian(16, 64).bfloat16(), inputs(64)
    x[:, 5] = 0
    found = get_backend(name, GPTQ).quantize(w, weights, None, moments_of(x))
    nearest = get_backend("torch").quantize(w, weights)
    same = code_values(found.codes[:, 5]) == code_values(nearest.codes[:, 5])
    # ModelOpt takes it in its turn: its own damping makes up for others there, if hardly.
    assert same.all() if name == "quark" else same.float().mean() > 0.9
    assert (code_values(found.codes[:, 5]) != 0).float().mean() > 0.7


@pytest.mark.parametrize("name", ["quark", "modelopt"])
def test_an_absmax_of_fused_weights_is_covered(name: BackendName) -> None:
    pytest.importorskip(name)
    w, x = gaussian(16, 64).bfloat16(), inputs(64)
    absmax = (w.abs().amax().float() * 1.7).reshape(1, 1)
    found = get_backend(name, GPTQ).quantize(w, FP8_TENSOR, absmax, moments_of(x))
    assert found.codes.shape == w.shape
    assert torch.equal(found.scale, get_backend("torch").quantize(w, FP8_TENSOR, absmax).scale)


@pytest.mark.parametrize("name", ["quark", "modelopt"])
def test_gptq_asks_for_moments(name: BackendName) -> None:
    pytest.importorskip(name)
    backend = get_backend(name, GPTQ)
    assert backend.needs == "second_moments"
    with pytest.raises(TypeError, match="needs the second moments"):
        backend.quantize(gaussian(8, 32), FP8_CHANNEL)
    assert get_backend(name).needs == "none"


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


@pytest.mark.vendor
@needs("modelopt")
@pytest.mark.parametrize("edge", EDGES)
def test_modelopts_search_of_edge_values(edge: str) -> None:
    w = EDGES[edge](torch.bfloat16).bfloat16().contiguous()
    found = get_backend("modelopt", MSE).quantize(w, FP8_CHANNEL)
    absmax = get_backend("torch").quantize(w, FP8_CHANNEL).scale
    assert ((found.scale >= absmax * 0.25) & (found.scale <= absmax)).all()
    assert found.dequantized().isfinite().all()


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
