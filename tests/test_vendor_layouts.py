"""What our layouts declare and pack, against real exports of Quark 0.13 and ModelOpt 0.47."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.backends import get_backend
from draftquant.quantize.backends.backend import ABSMAX_NEAREST
from draftquant.quantize.backends.modelopt_backend import _run_modelopt
from draftquant.quantize.backends.quark_backend import _weight_spec, quark_process_state
from draftquant.quantize.files.safetensors_header import TensorInfo
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.layouts.layout import Columns
from draftquant.quantize.numerics.quantized_weight import int4_words
from draftquant.recipes import ActivationFormat, WeightFormat, load_recipe
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from vendors import needs
from weight_formats import FP8_CHANNEL, FP8_TENSOR, INT4, INT4_GROUPS, MXFP4, NVFP4

PER_TOKEN = ActivationFormat(dtype="fp8_e4m3", granularity="token", dynamic=True)
STATIC = ActivationFormat(dtype="fp8_e4m3", granularity="tensor", dynamic=False)

pytestmark = [
    pytest.mark.vendor,
    pytest.mark.filterwarnings("ignore"),  # the toolkits' own
]
needs_quark = needs("quark")
needs_modelopt = needs("modelopt")


def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def declared(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    return found


def without_excludes(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("exclude", "exclude_modules", "ignore")
    return {key: value for key, value in config.items() if key not in keys}


def gaussian(dtype: torch.dtype) -> Tensor:
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
        tensors[name] = rows.tensor if isinstance(rows, Columns) else rows
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


# Quark


@needs_quark
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("recipe", "weights"), [("mi325x-w4a8", INT4_GROUPS), ("mi355-mxfp4", MXFP4)]
)
def test_quark_exports_the_same_groups(
    recipe: str, weights: WeightFormat, dtype: torch.dtype
) -> None:
    """Its whole export of one linear: INT4 groups transposed, MXFP4 exponents as bytes."""
    weight = gaussian(dtype)
    if weights == MXFP4:
        weight[3, :32] = 1  # of zeros, whose scale is 2^-127, Quark 0.13 stores 2^-126
    with torch.no_grad(), quark_process_state():
        from quark.torch import ModelQuantizer
        from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
        from quark.torch.quantization.config.config import QConfig, QLayerConfig

        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        layer = QLayerConfig(weight=_weight_spec(weights, "float"))
        quantizer = ModelQuantizer(QConfig(global_quant_config=layer))
        frozen = quantizer.freeze(quantizer.quantize_model(torch.nn.Sequential(linear), None))[0]
        exported = QParamsLinear(frozen, custom_mode="quark", pack_method="reorder")
    theirs = {"weight": exported.weight.data, "weight_scale": exported.weight_quantizer.scale}
    if weights == INT4_GROUPS:
        theirs["weight_zero_point"] = exported.weight_quantizer.zero_point
    assert_same_bytes(stored_by_us(recipe, weights, weight), theirs)


def quark_config(weights: WeightFormat, activations: ActivationFormat | None) -> Any:
    from quark.torch.quantization.config import config as quark

    def tensor_spec() -> Any:
        spec = quark.FP8E4M3PerTensorSpec(observer_method="min_max", scale_type="float32")
        return spec.to_quantization_spec()

    def channel_spec(axis: int, dynamic: bool) -> Any:
        spec = quark.FP8E4M3PerChannelSpec(ch_axis=axis, scale_type="float32", is_dynamic=dynamic)
        return spec.to_quantization_spec()

    weight = tensor_spec() if weights == FP8_TENSOR else channel_spec(0, False)
    if weights == INT4:
        weight = quark.Int4PerChannelSpec(
            symmetric=True, scale_type="float", round_method="half_even", ch_axis=0
        ).to_quantization_spec()
    inputs = {None: None, PER_TOKEN: channel_spec(1, True), STATIC: tensor_spec()}[activations]
    layer = quark.QLayerConfig(weight=weight, input_tensors=inputs)
    return quark.QConfig(global_quant_config=layer, exclude=["lm_head"])


@needs_quark
@pytest.mark.parametrize("weights", [INT4, FP8_CHANNEL, FP8_TENSOR], ids=str)
@pytest.mark.parametrize("activations", [None, PER_TOKEN, STATIC], ids=str)
def test_quark_declares_the_same(
    weights: WeightFormat, activations: ActivationFormat | None
) -> None:
    recipe = dataclasses.replace(
        load_recipe("mi325x-w4a8"), weights=weights, activations=activations
    )
    with quark_process_state():
        theirs = json.loads(json.dumps(quark_config(weights, activations).to_dict()))
    ours = get_layout("quark").declare(recipe, ())
    assert without_excludes(ours).keys() == without_excludes(theirs).keys() | {"export"}
    assert without_excludes(ours) | {"export": None} == without_excludes(theirs) | {"export": None}


@needs_quark
def test_quark_exports_the_same_json_as_we_do(tmp_path: Path) -> None:
    with quark_process_state():
        from quark.torch import ModelQuantizer, export_safetensors

        quantizer = ModelQuantizer(quark_config(INT4, PER_TOKEN))
        model = quantizer.freeze(quantizer.quantize_model(tiny_model(), None))
        export_safetensors(model, str(tmp_path))
    ours = get_layout("quark").declare(load_recipe("mi325x-w4a8"), ["lm_head"])
    theirs = declared(tmp_path)
    assert without_excludes(ours) == without_excludes(theirs)
    assert theirs["exclude"] == ["lm_head"]


@needs_quark
def test_quark_packs_the_same_words() -> None:
    with quark_process_state():
        from quark.torch.utils.pack import Pack_4_bits
    codes = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(0))
    for reorder in (True, False):
        theirs = Pack_4_bits("per_channel", "int4").pack(codes.to(torch.int32), reorder)
        assert torch.equal(int4_words(codes.to(torch.int8), interleaved=reorder, offset=0), theirs)


# ModelOpt


@needs_modelopt
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_modelopt_exports_the_same_nvfp4(dtype: torch.dtype) -> None:
    weight = gaussian(dtype)
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
def test_modelopt_exports_the_same_json_as_we_do(
    preset: str, weights: WeightFormat, activations: ActivationFormat, tmp_path: Path
) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def calibrate(model: torch.nn.Module) -> None:
        model(torch.zeros(1, 4, dtype=torch.long))

    model = mtq.quantize(tiny_model(), getattr(mtq, preset), calibrate)
    export_hf_checkpoint(model, export_dir=tmp_path)
    layout = get_layout("modelopt")
    recipe = dataclasses.replace(
        load_recipe("blackwell-fp8"), weights=weights, activations=activations
    )
    ours = layout.declare(recipe, ["lm_head"])
    assert without_excludes(ours) == without_excludes(declared(tmp_path))
    ((file, side),) = layout.side_files(ours).items()
    theirs = json.loads((tmp_path / file).read_text(encoding="utf-8"))
    assert side["producer"] == theirs["producer"]
    assert without_excludes(side["quantization"]) == without_excludes(theirs["quantization"])
