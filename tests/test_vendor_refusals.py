"""Why vendors' algorithms are refused, shown on the toolkits themselves.

Each test fails when the vendor mends what it shows: then that algorithm can be looked at again, and
`recipes/schemes.py` with it.
"""

from typing import Any

import pytest
import torch
from draftquant.quantize.backends import get_backend
from draftquant.quantize.numerics.number_formats import fp8_scale
from draftquant.recipes import Algorithm, WeightFormat
from gptq_textbook import gaussian, inputs, moments_of
from test_vendor_defects import modelopt_export, one_linear
from torch import Tensor, nn
from vendors import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vendor,
    pytest.mark.usefixtures("quark_imported"),
    pytest.mark.filterwarnings("ignore"),  # the toolkits' own
]
needs_quark = needs("quark")
needs_modelopt = needs("modelopt")

FP8: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
FP8_ROWS: dict[str, Any] = {"num_bits": (4, 3), "axis": 0}
INT4: dict[str, Any] = {"num_bits": 4, "axis": None, "block_sizes": {-1: 32}}
NVFP4_BLOCKS = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
NVFP4: dict[str, Any] = {"num_bits": (2, 1), "axis": None, "block_sizes": NVFP4_BLOCKS}
NVFP4_STATIC = NVFP4 | {"block_sizes": NVFP4_BLOCKS | {"type": "static"}}
WIDTH = 64


# ModelOpt 0.47


def calibrated(weights: dict[str, Any], algorithm: Any, activations: Any = None) -> nn.Module:
    """A linear after ModelOpt's calibration on 400 inputs."""
    import modelopt.torch.quantization as mtq

    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*weight_quantizer", "cfg": weights},
            *([{"quantizer_name": "*input_quantizer", "cfg": activations}] if activations else []),
        ],
        "algorithm": algorithm,
    }
    x = inputs(WIDTH)
    with torch.no_grad():
        model: nn.Module = mtq.quantize(one_linear(gaussian(24, WIDTH)), config, lambda m: m(x))
    return model


@needs_modelopt
@pytest.mark.parametrize("weights", [FP8, INT4], ids=["fp8", "int4"])
@pytest.mark.parametrize("algorithm", ["awq_lite", "awq_full"])
def test_modelopts_awq_leaves_a_factor_for_every_input(
    weights: dict[str, Any], algorithm: str
) -> None:
    """Under the declaration of FP8 per tensor, whose linears have one scale and nothing more."""
    exported = modelopt_export(calibrated(weights, algorithm), torch.float32)
    (factor,) = [t for name, t in exported.items() if name.endswith("pre_quant_scale")]
    assert factor.numel() == WIDTH
    assert not torch.equal(factor, torch.ones_like(factor))


@needs_modelopt
def test_modelopts_smoothquant_of_fp8_gives_every_input_a_scale() -> None:
    plain = modelopt_export(calibrated(FP8, "max", FP8), torch.float32)
    smooth = modelopt_export(calibrated(FP8, "smoothquant", FP8), torch.float32)
    assert plain["input_scale"].shape == ()
    assert smooth["input_scale"].shape == (WIDTH,)
    assert torch.equal(smooth["weight"].view(torch.uint8), plain["weight"].view(torch.uint8))


@needs_modelopt
def test_modelopts_svdquant_of_int4_loses_the_low_rank_part() -> None:
    """It is no buffer of the module: what is exported is the rest of the weight alone."""
    model = calibrated(INT4, {"method": "svdquant", "lowrank": 8})
    quantizer = model[0].weight_quantizer
    low_rank = quantizer.svdquant_lora_b @ quantizer.svdquant_lora_a
    assert low_rank.abs().max() > 0
    exported = modelopt_export(model, torch.float32)
    assert not [name for name in exported if "lora" in name]


@needs_modelopt
def test_modelopts_svdquant_of_fp8_names_the_low_rank_part_after_its_quantizer() -> None:
    exported = modelopt_export(calibrated(FP8, {"method": "svdquant", "lowrank": 8}), torch.float32)
    assert {"weight_quantizer._svdquant_lora_a", "weight_quantizer._svdquant_lora_b"} <= set(
        exported
    )


@needs_modelopt
@pytest.mark.skipif(torch.cuda.is_available(), reason="what it says on a CPU")
@pytest.mark.parametrize("algorithm", ["mse", "gptq"])
def test_modelopt_cannot_round_nvfp4_without_cuda_and_triton(algorithm: str) -> None:
    with pytest.raises(AssertionError, match="amax must be a CUDA tensor"):
        calibrated(NVFP4, algorithm)
    with pytest.raises(RuntimeError, match="requires triton"):
        calibrated(NVFP4_STATIC, algorithm)


@needs_modelopt
def test_modelopts_own_search_takes_scales_that_leave_the_largest_codes_unused() -> None:
    """Why the backend gives it the factors of a recipe: its own go from 1/4 to 4."""
    absmax = modelopt_export(calibrated(FP8_ROWS, "max"), torch.float32)["weight_scale"]
    found = modelopt_export(calibrated(FP8_ROWS, "mse"), torch.float32)["weight_scale"]
    assert (found / absmax > 1.5).any()
    weights = WeightFormat(dtype="fp8_e4m3", granularity="channel", symmetric=True)
    mse = get_backend("modelopt", Algorithm(scale="mse", rounding="nearest"))
    ours = mse.quantize(gaussian(24, WIDTH), weights).scale[:, 0]
    assert (ours <= absmax).all()


@needs_modelopt
def test_modelopts_search_gives_fused_weights_scales_of_their_own() -> None:
    """Under one absmax, as q, k and v have: so it is refused for scales of whole matrices."""
    import modelopt.torch.quantization as mtq

    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*weight_quantizer", "cfg": FP8},
        ],
        "algorithm": "mse",
    }
    found = set()
    for seed in range(4):
        weight = gaussian(24, WIDTH, seed=seed)
        weight[0, 0] = 4.5
        model = mtq.quantize(one_linear(weight), config, None)
        found.add(float(modelopt_export(model, torch.float32)["weight_scale"]))
    assert len(found) > 1
    assert found != {float(fp8_scale(torch.tensor(4.5)))}


# Quark 0.13


class Block(nn.Module):
    """What stands before and in the attention and MLP of an EAGLE-3 layer, linears alone."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.post_attention_layernorm = nn.RMSNorm(WIDTH)
        self.post_attention_layernorm.weight.data[::8] = 4
        self.q_proj, self.k_proj = (nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(2))
        self.up_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up_proj.weight.data = gaussian(WIDTH, WIDTH)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        embedding, hidden = x.chunk(2, -1)
        both = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + 0.01 * (self.q_proj(both) + self.k_proj(both))
        hidden = hidden + self.up_proj(self.post_attention_layernorm(hidden))
        return torch.cat([embedding, hidden], dim=-1)


class Model(nn.Module):
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig

        self.config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=2, num_key_value_heads=2)
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y


def quark_quantized(algorithm: Any) -> Model:
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import Int4PerChannelSpec, QConfig, QLayerConfig

    spec = Int4PerChannelSpec(
        symmetric=True, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False
    ).to_quantization_spec()
    config = QConfig(global_quant_config=QLayerConfig(weight=spec), algo_config=[algorithm])
    torch.manual_seed(0)
    x = inputs(2 * WIDTH, 32)[None]
    model: Model = ModelQuantizer(config).quantize_model(Model(), [x])
    return model


def folding(name: str, before: str, linears: list[str]) -> Any:
    from quark.torch.quantization.config import config

    layers = [
        {"prev_op": before, "layers": linears, "inp": linears[0], "module2inspect": linears[0]}
    ]
    kind = config.AWQConfig if name == "awq" else config.SmoothQuantConfig
    return kind(scaling_layers=layers, model_decoder_layers="layers")


@needs_quark
@pytest.mark.parametrize("name", ["awq", "smoothquant"])
def test_quark_cannot_fold_factors_into_two_norms(name: str) -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        quark_quantized(folding(name, "input_layernorm", ["q_proj", "k_proj"]))


@needs_quark
@pytest.mark.parametrize("name", ["awq", "smoothquant"])
def test_quark_folds_factors_into_a_norm_that_a_recipe_keeps(name: str) -> None:
    model = quark_quantized(folding(name, "post_attention_layernorm", ["up_proj"]))
    norm = model.layers[0].post_attention_layernorm.weight
    assert not torch.equal(norm, Block().post_attention_layernorm.weight)


@needs_quark
def test_quarks_svdquant_keeps_a_low_rank_part_beside_the_codes() -> None:
    from quark.torch.quantization.config.config import SVDQuantConfig

    model = quark_quantized(SVDQuantConfig(svd_rank=8, min_layer_size=8))
    names = set(model.layers[0].state_dict())
    plain = {f"{name}.weight" for name in ("q_proj", "k_proj", "up_proj")}
    assert {name for name in names if name.startswith("up_proj.")} - plain, names


@needs_quark
def test_quarks_gptq_zeroes_the_weights_of_an_input_that_was_never_seen() -> None:
    """Why it is given inputs with damping in them; the scales, absmax ones, would change too."""
    from quark.torch.algorithm.gptq.gptq import GPTQ

    found = {}
    x = inputs(WIDTH)
    x[:, 5] = 0
    weights = WeightFormat(dtype="int4", granularity="channel", symmetric=True)
    backend = get_backend("quark", Algorithm(scale="absmax", rounding="gptq"))
    ours = backend.quantize(gaussian(8, WIDTH), weights, None, moments_of(x))
    assert ours.codes[:, 5].any()
    real = GPTQ.quantize

    def with_the_inputs_themselves(self: Any, *args: Any, **options: Any) -> None:
        self.H = 2 * x.T @ x / len(x)
        real(self, *args, **options)
        found["weight"] = self.layer.weight.data.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTQ, "quantize", with_the_inputs_themselves)
        backend.quantize(gaussian(8, WIDTH), weights, None, moments_of(inputs(WIDTH)))
    assert not found["weight"][:, 5].any()
