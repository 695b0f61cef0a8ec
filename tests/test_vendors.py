"""Quark 0.13 and ModelOpt 0.47, run for real: codes, packing, declarations, GPTQ, a clean process.

No tolerance in codes and bytes. Shapes are those of drafts (GQA k/v, MLA kv_a with 576 rows) and
odd ones, values include what breaks quantizers.
"""

import contextlib
import dataclasses
import io
import json
import logging
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.backends import get_backend, quark_backend
from draftquant.quantize.backends.backend import ABSMAX_NEAREST
from draftquant.quantize.backends.modelopt_backend import _run_modelopt
from draftquant.quantize.backends.quark_backend import _weight_spec, quark_process_state
from draftquant.quantize.files.safetensors_header import TensorInfo
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.layouts.layout import GatheredColumns
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight, code_values
from draftquant.quantize.verify import verify
from draftquant.recipes import ActivationFormat, Algorithm, WeightFormat, load_recipe
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import BackendName
from draftquant.scripts.cli import main
from gptq_textbook import gaussian as large
from gptq_textbook import inputs, moments_of, textbook
from rounding_pairs import make_pair
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from vendors import needs
from weight_formats import (
    FP8_CHANNEL,
    FP8_TENSOR,
    INT4,
    INT4_GROUPS,
    MXFP4,
    NVFP4,
    PER_TOKEN,
    STATIC,
    TWO_STAGES,
)

pytestmark = [pytest.mark.vendor, pytest.mark.filterwarnings("ignore")]  # the toolkits' own
needs_quark, needs_modelopt = needs("quark"), needs("modelopt")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def cases(**formats: tuple[WeightFormat, ...]) -> list[Any]:
    return [
        pytest.param(name, w, marks=needs(name), id=f"{name}-{w}")  # type: ignore[arg-type]
        for name, found in formats.items()
        for w in found
    ]


VENDOR_FORMATS = cases(
    quark=(INT4, FP8_TENSOR, FP8_CHANNEL, INT4_GROUPS, TWO_STAGES, MXFP4),
    modelopt=(FP8_TENSOR, FP8_CHANNEL, NVFP4),
)
GPTQ_FORMATS = cases(
    quark=(INT4, INT4_GROUPS, FP8_CHANNEL, FP8_TENSOR, MXFP4), modelopt=(FP8_CHANNEL, FP8_TENSOR)
)


# ---- the process: the first test, in which a toolkit is really imported


@pytest.mark.parametrize(
    "name",
    [pytest.param("quark", marks=[needs("quark"), pytest.mark.slow]),
     pytest.param("modelopt", marks=needs("modelopt"))],
)  # fmt: skip
def test_first_use_leaves_the_process_as_it_was(
    name: BackendName, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Quark's without ninja on PATH, as in a venv that is not activated."""
    programs, scripts = tmp_path / "programs", tmp_path / "scripts"
    for folder, names in ((programs, ("c++", "g++", "gcc", "as", "ld")), (scripts, ("ninja",))):
        folder.mkdir()
        for program in names:
            found = shutil.which(program)
            if found is not None:
                (folder / program).symlink_to(found)
    # The same ninja: another version would rebuild the extension.
    if (scripts / "ninja").exists():
        real = sysconfig.get_path

        def get_path(name: str, *rest: Any, **named: Any) -> str:
            return str(scripts) if name == "scripts" else real(name, *rest, **named)

        monkeypatch.setattr(sysconfig, "get_path", get_path)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("QUARK_DISABLE_COMPILE", raising=False)

    def process_state() -> tuple[object, ...]:
        root = logging.root
        return (
            dict(os.environ), list(warnings.filters), root.level, list(root.handlers),
            root.manager.disable, torch.get_num_threads(), torch.get_default_dtype(),
            torch.is_grad_enabled(), sys.stdout, sys.stderr,
        )  # fmt: skip

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        before = process_state()
        get_backend(name).quantize(torch.eye(8), FP8_TENSOR)
        after = process_state()
    assert after == before
    assert printed.getvalue() == ""


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs(n)) for n in ("quark", "modelopt")])
def test_a_failure_is_a_backend_error(name: BackendName, monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor passes no toolkit; our own checks, which need values, are bypassed."""
    module = sys.modules[type(get_backend(name)).__module__]
    monkeypatch.setattr(module, "finite_absmax", lambda *_: torch.ones(8, 1))
    with pytest.raises(BackendError, match="failed: ") as caught:
        get_backend(name).quantize(torch.ones(8, 8, device="meta"), FP8_TENSOR)
    assert caught.value.__cause__ is not None


# ---- codes


SHAPES = {
    "q": (256, 512),
    "k or v, GQA": (32, 512),
    "kv_a, MLA": (576, 64),
    "one row": (1, 64),
    "one column": (64, 1),
    "odd": (9, 5),
    "odd, long rows": (7, 1001),
}


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def with_row(row: Tensor) -> Tensor:
    """A Gaussian matrix whose row 3 is given."""
    weight = gaussian(8, row.numel())
    weight[3] = row
    return weight


def signs(columns: int) -> Tensor:
    return torch.tensor([1.0, -1.0]).repeat(columns // 2)


EDGES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "all-zero row": lambda _: with_row(torch.zeros(16)),
    "all-zero matrix": lambda _: torch.zeros(8, 16),
    "negative zeros": lambda _: -torch.zeros(8, 16),
    "tiny row": lambda _: with_row(gaussian(1, 16, seed=1)[0] * 1e-10),
    "subnormal row": lambda d: with_row(gaussian(1, 16)[0] * 40 * torch.finfo(d).smallest_normal),
    "smallest subnormal": lambda d: (
        signs(16).expand(8, 16) * torch.finfo(d).smallest_normal * torch.finfo(d).eps
    ),
    "ties of int4": lambda _: torch.cat([torch.arange(-7.5, 8.0), torch.zeros(8)]).expand(3, 24),
    "ties of fp8": lambda _: torch.tensor(
        [448.0, 17.0, 19.0, 21.0, -17.0, 2.0**-10, 3 * 2.0**-10, -5 * 2.0**-10, 0.53125, 432.0]
    ).expand(3, 10),
    "one huge outlier": lambda _: with_row(torch.tensor([6e4] + [1e-3] * 15)),
    "+absmax": lambda _: gaussian(8, 16).abs(),
    "+absmax and -absmax": lambda _: gaussian(8, 1) * signs(16),
    "near the largest number": lambda d: gaussian(8, 16).sign() * torch.finfo(d).max,
    "every half step": lambda _: torch.linspace(-1, 1, 897).reshape(1, -1).expand(4, 897),
}


def same_bits(ours: QuantizedWeight, theirs: QuantizedWeight) -> bool:
    """Equal dtypes, shapes and bytes: -0.0 differs from 0.0, NaN equals itself."""

    def said(weight: QuantizedWeight) -> list[Any]:
        tensors = [t for t in (weight.codes, weight.scale, weight.global_scale) if t is not None]
        bits = [t.flatten().view(torch.uint8).tolist() for t in tensors]
        return [weight.group_size, *((t.dtype, t.shape) for t in tensors), *bits]

    return said(ours) == said(theirs)


def in_whole_groups(weight: Tensor, weights: WeightFormat) -> Tensor:
    """The weight, its columns repeated until they are whole groups (layouts refuse others)."""
    size = weights.group_size or 1
    columns = -(-weight.shape[1] // size) * size
    return weight.repeat(1, -(-columns // weight.shape[1]))[:, :columns].contiguous()


def assert_equal_to_torch(name: BackendName, weights: WeightFormat, weight: Tensor) -> None:
    source = weight.clone()
    theirs = get_backend(name).quantize(weight, weights)
    assert same_bits(get_backend("torch").quantize(source, weights), theirs)
    assert torch.equal(weight, source), "the toolkit wrote into the caller's weight"


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "weights"), VENDOR_FORMATS)
def test_gaussian(name: BackendName, weights: WeightFormat, shape: str, dtype: torch.dtype) -> None:
    rows, columns = SHAPES[shape]
    size = weights.group_size or 1
    assert_equal_to_torch(name, weights, gaussian(rows, -(-columns // size) * size).to(dtype))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("name", "weights"), VENDOR_FORMATS)
def test_edges(name: BackendName, weights: WeightFormat, edge: str, dtype: torch.dtype) -> None:
    weight = in_whole_groups(EDGES[edge](dtype).to(dtype).contiguous(), weights)
    rows = weight.float().abs().amax(dim=1)
    least = rows.amin() if weights == FP8_CHANNEL else rows.amax()
    if name == "modelopt" and least < torch.finfo(torch.float32).tiny:
        with pytest.raises(BackendError, match=r"at least 2\^-126"):  # or NaN, or a scale too large
            get_backend(name).quantize(weight, weights)
        return
    assert_equal_to_torch(name, weights, weight)


@needs_quark
@pytest.mark.parametrize("weights", [INT4, MXFP4], ids=str)
def test_weight_larger_than_a_block(weights: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported in several blocks of rows; the last one is not full."""
    monkeypatch.setattr(quark_backend, "BLOCK_ELEMENTS", 10 * 64)
    assert_equal_to_torch("quark", weights, gaussian(33, 64).to(torch.bfloat16))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "weights"), cases(quark=(FP8_TENSOR,), modelopt=(FP8_TENSOR, NVFP4))
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 1.7, 40.0])
def test_vendors_cover_the_absmax_of_fused_weights_as_torch_does(
    name: BackendName, weights: WeightFormat, dtype: torch.dtype, factor: float
) -> None:
    """1.7 times a bfloat16 is none: the weight is then given to the toolkit in float32."""
    weight = (torch.randn(24, 64, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype)
    absmax = (weight.abs().amax().float() * factor).reshape(1, 1)
    theirs = get_backend(name).quantize(weight.clone(), weights, absmax)
    ours = get_backend("torch").quantize(weight, weights, absmax)
    assert same_bits(ours, theirs)
    if factor > 1:
        own = get_backend("torch").quantize(weight, weights)
        assert not torch.equal(own.codes.view(torch.uint8), ours.codes.view(torch.uint8))


# ---- layouts


def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=32, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def declared(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return dict(config["quantization_config"])


def without_excludes(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("exclude", "exclude_modules", "ignore")
    return {key: value for key, value in config.items() if key not in keys}


def some_weight(dtype: torch.dtype) -> Tensor:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3, :32] = 0
    return weight.to(dtype)


def stored_by_us(recipe_name: str, weights: WeightFormat, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of one linear in a recipe's layout, by suffix."""
    recipe = dataclasses.replace(load_recipe(recipe_name), weights=weights, activations=None)
    layout, block = get_layout(recipe.layout), get_backend("torch").quantize(weight, weights)
    dtype = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[weight.dtype]
    info = TensorInfo(
        name="m.weight", dtype=dtype, shape=tuple(weight.shape), file="x", start=0, stop=0
    )
    tensors = dict(layout.encode_whole(info, block, recipe, None))
    for name, rows in layout.encode_rows("m", block, weights).items():
        tensors[name] = rows.tensor if isinstance(rows, GatheredColumns) else rows
    assert {t.name: t.shape for t in layout.stored(info, recipe)} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    return {name.removeprefix("m."): tensor for name, tensor in tensors.items()}


def assert_same_bytes(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        raw = tensor.detach().flatten().view(torch.uint8)
        assert torch.equal(ours[name].flatten().view(torch.uint8), raw), name


@needs_quark
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("recipe", "weights"),
    [("mi325x-w4a8", INT4), ("mi325x-w4a8", INT4_GROUPS), ("mi355-mxfp4", MXFP4)],
)
def test_quark_exports_our_bytes(recipe: str, weights: WeightFormat, dtype: torch.dtype) -> None:
    """Its whole export of one linear: INT4 groups transposed, MXFP4 exponents as bytes."""
    weight = some_weight(dtype)
    if weights == MXFP4:
        weight[3, :32] = 1  # of zeros, whose scale is 2^-127, Quark 0.13 stores 2^-126
    with torch.no_grad(), quark_process_state():
        from quark.torch import ModelQuantizer
        from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
        from quark.torch.quantization.config.config import QConfig, QLayerConfig

        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        layer = QLayerConfig(weight=_weight_spec(weights, "float"))
        quantizer = ModelQuantizer(QConfig(global_quant_config=layer))
        frozen = quantizer.freeze(quantizer.quantize_model(nn.Sequential(linear), None))[0]
        exported = QParamsLinear(frozen, custom_mode="quark", pack_method="reorder")
    theirs = {"weight": exported.weight.data, "weight_scale": exported.weight_quantizer.scale}
    if weights != MXFP4:
        theirs["weight_zero_point"] = exported.weight_quantizer.zero_point
    assert_same_bytes(stored_by_us(recipe, weights, weight), theirs)


@needs_quark
@pytest.mark.parametrize(
    ("recipe", "weights"), [("mi325x-w4a8", INT4), ("mi325x-fp8", FP8_CHANNEL)]
)
def test_quark_exports_our_json(recipe: str, weights: WeightFormat, tmp_path: Path) -> None:
    with quark_process_state():
        from quark.torch import ModelQuantizer, export_safetensors
        from quark.torch.quantization.config import config as quark

        inputs = quark.FP8E4M3PerChannelSpec(ch_axis=1, scale_type="float32", is_dynamic=True)
        layer = quark.QLayerConfig(
            weight=_weight_spec(weights, "float"), input_tensors=inputs.to_quantization_spec()
        )
        quantizer = ModelQuantizer(quark.QConfig(global_quant_config=layer, exclude=["lm_head"]))
        model = quantizer.freeze(quantizer.quantize_model(tiny_model(), None))
        export_safetensors(model, str(tmp_path))
    ours = get_layout("quark").declare(load_recipe(recipe), ["lm_head"])
    theirs = declared(tmp_path)
    assert without_excludes(ours) == without_excludes(theirs)
    assert theirs["exclude"] == ["lm_head"]


@needs_modelopt
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modelopt_exports_the_same_nvfp4(dtype: torch.dtype) -> None:
    weight = some_weight(dtype)
    with torch.no_grad():
        theirs = _run_modelopt(weight, NVFP4, ABSMAX_NEAREST, None).state_dict()
    names = ("weight", "weight_scale", "weight_scale_2")
    ours = stored_by_us("blackwell-nvfp4", NVFP4, weight)
    assert_same_bytes(ours, {name: theirs[name] for name in names})


@needs_modelopt
@pytest.mark.parametrize(
    ("preset", "weights", "activations"),
    [
        ("FP8_DEFAULT_CFG", FP8_TENSOR, STATIC),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", FP8_CHANNEL, PER_TOKEN),
    ],
)
def test_modelopt_exports_our_json(
    preset: str, weights: WeightFormat, activations: ActivationFormat, tmp_path: Path
) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def calibrate(model: torch.nn.Module) -> None:
        model(torch.zeros(1, 4, dtype=torch.long))

    model = mtq.quantize(tiny_model(), getattr(mtq, preset), calibrate)
    export_hf_checkpoint(model, export_dir=tmp_path)
    layout = get_layout("modelopt")
    base = load_recipe("blackwell-fp8")
    recipe = dataclasses.replace(base, weights=weights, activations=activations)
    ours = layout.declare(recipe, ["lm_head"])
    assert without_excludes(ours) == without_excludes(declared(tmp_path))
    ((file, side),) = layout.side_files(ours).items()
    theirs = json.loads((tmp_path / file).read_text(encoding="utf-8"))
    assert side["producer"] == theirs["producer"]
    assert without_excludes(side["quantization"]) == without_excludes(theirs["quantization"])


# ---- their algorithms

GPTQ = Algorithm(scale="absmax", rounding="gptq")
MSE = Algorithm(scale="mse", rounding="nearest")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "weights"), GPTQ_FORMATS)
def test_textbook_codes(name: BackendName, weights: WeightFormat, dtype: torch.dtype) -> None:
    """160 columns, more than one block; damping of 1 %; Quark orders columns, ModelOpt does not."""
    w, x = large(24, 160).to(dtype), inputs(160)
    found = get_backend(name, GPTQ).quantize(w, weights, None, moments_of(x))
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


@pytest.mark.slow
@needs_modelopt
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_modelopt_finds_the_best_of_the_recipes_factors(dtype: torch.dtype) -> None:
    w = large(24, 96).to(dtype)
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


NOT_THESE: list[tuple[BackendName, Algorithm, WeightFormat, str]] = [
    ("quark", GPTQ, TWO_STAGES, "expected weights that are rounded once"),
    ("modelopt", GPTQ, NVFP4, "in Triton kernels, on CUDA alone"),
    ("modelopt", MSE, NVFP4, "in Triton kernels, on CUDA alone"),
    ("modelopt", MSE, FP8_TENSOR, "searches one for each weight alone"),
]


@pytest.mark.parametrize(("name", "algorithm", "weights", "message"), NOT_THESE)
def test_formats_that_an_algorithm_does_not_take_are_refused(
    name: BackendName, algorithm: Algorithm, weights: WeightFormat, message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        get_backend(name, algorithm).check(weights)


@pytest.mark.slow
@needs_modelopt
def test_a_factor_that_modelopt_does_not_find_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so on stdout, and goes on with the nearest codes."""
    monkeypatch.setattr(InputMoments, "as_inputs", torch.full((32, 32), torch.nan))
    with pytest.raises(BackendError, match="went on with the nearest codes"):
        get_backend("modelopt", GPTQ).quantize(
            large(8, 32), FP8_CHANNEL, None, InputMoments(torch.eye(32))
        )


@pytest.mark.slow
@needs_quark
@needs_modelopt
@pytest.mark.parametrize(
    ("recipe", "backend", "algorithm"),
    [("mi325x-w4a8-fp8", "quark", "gptq"), ("blackwell-fp8-mla", "modelopt", "mse")],
)
def test_a_draft_is_verified(recipe: str, backend: str, algorithm: str, tmp_path: Path) -> None:
    pair, out, argv = tmp_path / "pair", tmp_path / "out", ["--algorithm", algorithm]
    make_pair(pair, "dflash", num_prompts=4)
    if algorithm == "gptq":
        argv += ["--traces", str(pair / "traces"), "--target", str(pair / "target")]
    argv += ["--recipe", recipe, "--backend", backend, "--out", str(out)]
    assert main(["quantize", str(pair / "draft"), *argv]) == 0
    report = verify(out, pair / "draft")
    assert report.ok, report.faults
    wanted = "a search around absmax" if algorithm == "mse" else "4 times the error of the nearest"
    assert wanted in report.rule
    record = json.loads((out / "draftquant.json").read_text(encoding="utf-8"))
    assert record["recipe"]["backend"] == backend
    assert len(record.get("calibration_prompts", ())) == (4 if algorithm == "gptq" else 0)
