"""Known defects of the vendor toolkits, shown on the toolkits themselves, and that we avoid them.

Each test fails when the vendor repairs the defect: then drop the workaround that it names.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.backends import get_backend
from draftquant.quantize.layouts.layout import stored_scale
from draftquant.quantize.numerics.number_formats import fp8_codes, fp8_scale
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import WeightFormat
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vendors import needs
from weight_formats import FP8_CHANNEL, FP8_TENSOR, INT4, MXFP4, NVFP4

LINEAR = "model.layers.0.self_attn.q_proj"
ORDER, REORDER = (0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vendor,
    pytest.mark.usefixtures("quark_imported"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),  # ModelOpt's own
]
needs_quark = needs("quark")
needs_modelopt = needs("modelopt")


def gaussian(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


def different(codes: Tensor, expected: Tensor) -> float:
    return (codes.view(torch.uint8) != expected.view(torch.uint8)).float().mean().item()


def one_linear(weight: Tensor) -> nn.Sequential:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return nn.Sequential(linear)


# ModelOpt 0.47


def modelopt_quantized(weight: Tensor, attributes: dict[str, Any]) -> nn.Module:
    import modelopt.torch.quantization as mtq

    own = {"quantizer_name": "*weight_quantizer", "cfg": attributes}
    rows = [{"quantizer_name": "*", "enable": False}, own]
    config = {"quant_cfg": rows, "algorithm": "max"}
    model: nn.Module = mtq.quantize(one_linear(weight.clone()), config, forward_loop=None)
    return model


def modelopt_export(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    from modelopt.torch.export.unified_export_hf import _process_quantized_modules

    with torch.no_grad():
        _process_quantized_modules(model, dtype)
    return {name.removeprefix("0."): tensor for name, tensor in model.state_dict().items()}


FP8_PER_TENSOR: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
FP8_PER_CHANNEL: dict[str, Any] = {"num_bits": (4, 3), "axis": 0}


@needs_modelopt
def test_modelopt_contract_of_the_private_export() -> None:
    from modelopt.torch.export.unified_export_hf import _process_quantized_modules

    assert list(inspect.signature(_process_quantized_modules).parameters)[:2] == ["model", "dtype"]


@needs_modelopt
def test_modelopt_default_export_rounds_bfloat16_twice() -> None:
    weight = gaussian(256, 512)
    expected = fp8_codes(weight, fp8_scale(weight.abs().amax()))
    default = modelopt_export(modelopt_quantized(weight, FP8_PER_TENSOR), torch.bfloat16)["weight"]
    assert different(default, expected) > 0.01
    assert different(get_backend("modelopt").quantize(weight, FP8_TENSOR).codes, expected) == 0.0


@needs_modelopt
def test_modelopt_gives_nan_for_an_all_zero_weight() -> None:
    weight = torch.zeros(8, 32, dtype=torch.bfloat16)
    groups = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
    nvfp4 = {"num_bits": (2, 1), "axis": None, "block_sizes": groups}
    for weights, attributes, scale, codes in (
        (FP8_TENSOR, FP8_PER_TENSOR, "weight_scale", "weight"),
        (NVFP4, nvfp4, "weight_scale_2", "weight_scale"),
    ):
        exported = modelopt_export(modelopt_quantized(weight, attributes), torch.float32)
        assert exported[scale].item() == 0.0
        assert exported[codes].float().isnan().all()
        with pytest.raises(BackendError, match="ModelOpt has no scale for less"):
            get_backend("modelopt").quantize(weight, weights)


@needs_modelopt
@pytest.mark.parametrize("calibrated", [False, True])
def test_modelopt_drops_input_scale_without_calibration(calibrated: bool) -> None:
    """Why static activation scales never come from ModelOpt: this backend computes weights only."""
    import modelopt.torch.quantization as mtq

    def one_batch(model: nn.Module) -> None:
        model(torch.ones(2, 16))

    loop = one_batch if calibrated else None
    model = mtq.quantize(one_linear(gaussian(8, 16, torch.float32)), mtq.FP8_DEFAULT_CFG, loop)
    assert ("input_scale" in modelopt_export(model, torch.float32)) is calibrated


@needs_modelopt
def test_modelopt_cannot_export_int4_per_channel() -> None:
    model = modelopt_quantized(gaussian(8, 16), {"num_bits": 4, "axis": 0})
    with pytest.raises(TypeError, match="no len"):
        modelopt_export(model, torch.float32)
    with pytest.raises(BackendError, match="got int4 per channel"):
        get_backend("modelopt").quantize(gaussian(8, 16), INT4)


@needs_modelopt
def test_modelopt_cannot_export_one_row_per_channel() -> None:
    model = modelopt_quantized(gaussian(1, 16), FP8_PER_CHANNEL)
    with pytest.raises(IndexError):
        modelopt_export(model, torch.float32)
    assert get_backend("modelopt").quantize(gaussian(1, 16), FP8_CHANNEL).scale.shape == (1, 1)


@needs_modelopt
@pytest.mark.parametrize(
    ("dtype", "absmax"), [(torch.float16, 3e-5), (torch.bfloat16, 2e-39)], ids=str
)
def test_modelopt_floors_the_absmax_of_a_small_channel(dtype: torch.dtype, absmax: float) -> None:
    """At the smallest normal number of the weight's dtype: 6e-5 in float16."""
    weight = gaussian(8, 16, dtype)
    weight[3] = absmax
    exported = modelopt_export(modelopt_quantized(weight, FP8_PER_CHANNEL), torch.float32)
    floor = fp8_scale(torch.tensor(torch.finfo(dtype).smallest_normal))
    assert exported["weight_scale"][3] == floor
    if absmax < 2.0**-126:
        with pytest.raises(BackendError, match="ModelOpt has no scale for less"):
            get_backend("modelopt").quantize(weight, FP8_CHANNEL)
    else:
        ours = get_backend("modelopt").quantize(weight, FP8_CHANNEL)
        assert ours.scale[3] == fp8_scale(weight[3].max())


# Quark 0.13


def quark_config(spec: Any, input_spec: Any = None) -> Any:
    from quark.torch.quantization.config.config import QConfig, QLayerConfig

    layer = QLayerConfig(weight=spec, input_tensors=input_spec)
    return QConfig(global_quant_config=layer, exclude=["*embed_tokens*", "lm_head"])


def int4_spec() -> Any:
    from quark.torch.quantization.config.config import Int4PerChannelSpec

    return Int4PerChannelSpec(
        symmetric=True, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False
    ).to_quantization_spec()


def fp8_tensor_spec() -> Any:
    from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec

    return FP8E4M3PerTensorSpec(
        observer_method="min_max", scale_type="float32", is_dynamic=False
    ).to_quantization_spec()


def file_to_file(config: Any, weight: Tensor, folder: Path) -> Path:
    """Quark's checkpoint-to-checkpoint mode on a folder with one linear; gives the output."""
    from quark.torch import ModelQuantizer

    source, out = folder / "source", folder / "out"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    save_file({f"{LINEAR}.weight": weight}, source / "model.safetensors")
    ModelQuantizer(config).direct_quantize_checkpoint(
        pretrained_model_path=str(source), save_path=str(out), device="cpu"
    )
    return out


def unpacked(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """int32 [rows, words] -> int4 codes [rows, 8 * words]: nibble i holds column order[i]."""
    nibbles = torch.stack([(words >> (4 * i)) & 0xF for i in range(8)], dim=-1)
    signed = torch.where(nibbles > 7, nibbles - 16, nibbles)
    codes = torch.empty_like(signed)
    codes[..., list(order)] = signed
    return codes.flatten(1).to(torch.int8)


@needs_quark
def test_quark_contract_of_the_export_internals() -> None:
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer
    from quark.torch.utils.pack import PackMethod

    expected = {"qspec", "quantizer", "reorder", "real_quantized", "device", "float_dtype"}
    assert expected <= inspect.signature(get_real_quantizer).parameters.keys()
    codes = torch.arange(8)
    assert PackMethod(None, "int4").pack(codes, False) is codes


@needs_quark
def test_quark_stores_the_smallest_mxfp4_scale_twice_as_large() -> None:
    """2^-127, the scale of an all-zero group, is subnormal: Quark's logarithm gives 2^-126."""
    from quark.torch.utils.numerics import to_e8m0_uint8

    scales = torch.tensor([2.0**-127, 2.0**-126, 1.0, 2.0**127])
    assert to_e8m0_uint8(scales).tolist() == [1, 1, 127, 254]
    assert stored_scale(scales, MXFP4).tolist() == [0, 1, 127, 254]


@needs_quark
def test_quark_file_to_file_packs_in_another_order_than_it_declares(tmp_path: Path) -> None:
    weight = gaussian(64, 128)
    out = file_to_file(quark_config(int4_spec()), weight, tmp_path)
    declared = json.loads((out / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert declared["export"]["pack_method"] == "reorder"
    words = load_file(next(out.glob("*.safetensors")))[f"{LINEAR}.weight"]
    ours = get_backend("quark").quantize(weight, INT4).codes
    assert torch.equal(unpacked(words, ORDER), ours)
    assert not torch.equal(unpacked(words, REORDER), ours)


@needs_quark
def test_quark_file_to_file_declares_a_static_input_scale_and_omits_it(tmp_path: Path) -> None:
    config = quark_config(fp8_tensor_spec(), fp8_tensor_spec())
    out = file_to_file(config, gaussian(64, 128), tmp_path)
    declared = json.loads((out / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert declared["global_quant_config"]["input_tensors"]["is_dynamic"] is False
    with safe_open(next(out.glob("*.safetensors")), "pt") as file:
        assert set(file.keys()) == {f"{LINEAR}.weight", f"{LINEAR}.weight_scale"}


@needs_quark
def test_quark_file_to_file_deletes_an_existing_output(tmp_path: Path) -> None:
    notes = tmp_path / "out" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("a month of work", encoding="utf-8")
    file_to_file(quark_config(int4_spec()), gaussian(8, 16), tmp_path)
    assert not notes.exists()


@needs_quark
@pytest.mark.parametrize("weights", [INT4, FP8_TENSOR], ids=["int4", "fp8"])
def test_quark_turns_inf_into_nan_silently(weights: WeightFormat) -> None:
    from quark.torch import ModelQuantizer

    weight = gaussian(8, 16)
    weight[2, 3] = float("inf")
    spec = int4_spec() if weights is INT4 else fp8_tensor_spec()
    model = ModelQuantizer(quark_config(spec)).quantize_model(one_linear(weight.clone()), None)
    assert ModelQuantizer.freeze(model)[0].weight.isnan().any()
    with pytest.raises(BackendError, match="got NaN or inf"):
        get_backend("quark").quantize(weight, weights)


@needs_quark
def test_quark_freeze_writes_into_the_buffer_that_a_weight_is_a_view_of() -> None:
    """Why we freeze with quantize=False: a weight may be a view of a whole shard."""
    from quark.torch import ModelQuantizer

    shard = gaussian(16, 16)
    before = shard.clone()
    model = one_linear(shard[:8])
    ModelQuantizer.freeze(ModelQuantizer(quark_config(int4_spec())).quantize_model(model, None))
    assert not torch.equal(shard, before)
    shard = before.clone()
    get_backend("quark").quantize(shard[:8], INT4)
    assert torch.equal(shard, before)


@needs_quark
def test_quark_rounds_bfloat16_twice_in_fp8() -> None:
    """Its own export, given the bfloat16 weight; we give it the same weight in float32."""
    from quark.torch import ModelQuantizer
    from quark.torch.export.nn.modules.qparamslinear import QParamsLinear

    weight = gaussian(256, 512)
    expected = fp8_codes(weight, fp8_scale(weight.abs().amax()))
    config = quark_config(fp8_tensor_spec())
    model = ModelQuantizer(config).quantize_model(one_linear(weight.clone()), None)
    frozen = ModelQuantizer.freeze(model)[0]
    assert different(QParamsLinear(frozen, custom_mode="quark").weight.data, expected) > 0.01
    assert different(get_backend("quark").quantize(weight, FP8_TENSOR).codes, expected) == 0.0
