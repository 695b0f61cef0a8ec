"""What the engines' plugins do with Quark's INT4; that engines take it is shown by --engines."""

import copy
import itertools
import sys
from functools import partial
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.numerics.quantized_weight import int4_words
from draftquant.quantize.plugins.int4_linear import UnpackedInt4, as_fp8, is_int4_per_channel
from draftquant.recipes import built_in_recipes, load_recipe
from torch import Tensor, nn

ROWS, COLUMNS = 16, 24


def layer_config(recipe: str) -> dict[str, Any]:
    declared = get_layout("quark").declare(load_recipe(recipe).stored, [])
    config: dict[str, Any] = copy.deepcopy(declared["global_quant_config"])
    return config


def codes() -> Tensor:
    return torch.randint(-8, 8, (ROWS, COLUMNS), generator=torch.manual_seed(0)).to(torch.int8)


class PlainFp8:
    """FP8 weights per channel, multiplied as they are."""

    def create_weights(self, layer: nn.Module, output_partition_sizes: Any, **rest: Any) -> None:
        shape = (sum(output_partition_sizes), rest["input_size_per_partition"])
        layer.weight = parameter(data=torch.zeros(shape, dtype=torch.float8_e4m3fn))
        layer.weight_scale = parameter(data=torch.zeros(shape[0]))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = parameter(data=layer.weight.data.t())

    def apply_weights(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x @ layer.weight.to(torch.float32) * layer.weight_scale


def parameter(*, data: Tensor, **sharded: Any) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=False)
    vars(made).update(sharded)
    return made


def unpacked(*, reordered: bool) -> UnpackedInt4:
    return UnpackedInt4(PlainFp8(), reordered=reordered, parameters=PARAMETERS)


def created(scheme: UnpackedInt4, rows: list[int], columns: int) -> Any:
    layer = nn.Module()
    scheme.create_weights(layer, rows, columns, torch.bfloat16, print)
    return layer


def test_only_int4_per_channel_under_fp8_is_taken() -> None:
    quark = [name for name in built_in_recipes() if load_recipe(name).layout == "quark"]
    taken = [name for name in quark if is_int4_per_channel(layer_config(name))]
    assert taken == ["mi325x-w4a8", "mi325x-w4a8-gptq"]
    for name in sorted({*quark} - {*taken}):
        assert as_fp8(layer_config(name)) == layer_config(name)
    other = {"symmetric": False, "qscheme": "per_group", "is_dynamic": True, "ch_axis": 1}
    for key, value in other.items():
        config = layer_config("mi325x-w4a8")
        config["weight"][key] = value
        assert as_fp8(config) is config
    told, declared = as_fp8(layer_config(taken[0]))["weight"], layer_config("mi325x-fp8")["weight"]
    assert all(told[key] == declared[key] for key in ("dtype", *other))


@pytest.mark.parametrize("reordered", [True, False])
def test_served_is_the_product_with_the_codes_and_scales(reordered: bool) -> None:
    scheme = unpacked(reordered=reordered)
    layer = created(scheme, [8, 8], COLUMNS)
    assert layer.weight.shape == (ROWS, COLUMNS // 8)
    assert layer.weight_zero_point.shape == (ROWS // 8,)
    sharded = {"packed_factor": 8, "weight_loader": print, "output_dim": 0}  # between GPUs
    assert vars(layer.weight) == {**sharded, "input_dim": 1, "packed_dim": 1}
    assert vars(layer.weight_zero_point) == {**sharded, "packed_dim": 0}
    layer.weight.data.copy_(int4_words(codes(), interleaved=reordered, unsigned=False))
    layer.weight_scale.data.copy_(torch.linspace(0.5, 2.0, ROWS))
    scheme.process_weights_after_loading(layer)
    x = torch.randn(3, COLUMNS, generator=torch.manual_seed(1))
    expected = x @ codes().float().T * torch.linspace(0.5, 2.0, ROWS)
    assert torch.equal(scheme.apply_weights(layer, x), expected)
    assert "weight_zero_point" not in dict(layer.named_parameters())


def test_a_shard_within_a_word_and_a_zero_point_are_refused() -> None:
    scheme = unpacked(reordered=True)
    for rows, columns in (([8, 4], 24), ([8, 8], 20)):
        with pytest.raises(ValueError, match="fewer tensor-parallel shards"):
            created(scheme, rows, columns)
    layer = created(scheme, [ROWS], COLUMNS)
    layer.weight_zero_point.data[1] = 1
    with pytest.raises(ValueError, match="expected symmetric INT4"):
        scheme.process_weights_after_loading(layer)


class LinearMethod: ...


class OwnQuark:
    """What an engine's own class finds declared of each linear, by its whole name."""

    pack_method = "reorder"
    declared: ClassVar = {"model.layers.0.mlp.up_proj": "mi325x-w4a8",
                          "model.layers.0.mlp.down_proj": "mi325x-fp8"}  # fmt: skip

    def get_quant_method(self, layer: Any, _prefix: str) -> object:
        return LinearMethod() if layer.is_linear else None

    def _find_matched_config(self, prefix: str, _layer: object) -> dict[str, Any]:
        return layer_config(self.declared[prefix])

    def _get_scheme_from_config(self, config: dict[str, Any], dynamic: bool = False) -> Any:
        return config["weight"]["dtype"], dynamic  # SGLang, and vLLM to 0.29

    def _get_scheme_cls_from_config(self, config: dict[str, Any]) -> Any:
        return config["weight"]["dtype"]  # vLLM from 0.30


METHODS: dict[str, type] = {}
QUARK = {"QuarkConfig": OwnQuark, "QuarkLinearMethod": LinearMethod}
PARAMETERS = SimpleNamespace(PackedvLLMParameter=parameter, PackedColumnParameter=parameter)
ENGINES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "vllm.general_plugins": ("vllm.model_executor", {
        "": {"parameter": PARAMETERS},
        "layers.quantization": {
            "register_quantization_config": lambda name: partial(METHODS.__setitem__, name)
        },
        "layers.quantization.quark.quark": QUARK,
    }),
    "sglang.srt.plugins": ("sglang.srt", {
        "layers": {"parameter": PARAMETERS},
        "layers.quantization": {"QUANTIZATION_METHODS": METHODS},
        "layers.quantization.quark.quark": QUARK,
    }),
}  # fmt: skip
"""Group of entry points -> the modules of the engine that its plugin imports from."""


@pytest.mark.parametrize("group", ENGINES)
def test_engines_take_our_class_for_theirs(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With modules of the test's: a linear gets INT4 where that is declared of it."""
    METHODS["quark"] = OwnQuark
    root, given = ENGINES[group]
    for below, held in given.items():
        parts = [*root.split("."), *filter(None, below.split("."))]
        for name in itertools.accumulate(parts, "{}.{}".format):
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[".".join(parts)]).update(held)
    (found,) = (point for point in entry_points(group=group) if point.name == "draftquant")
    try:
        found.load()()
    finally:
        sys.modules.pop(found.module, None)
    assert issubclass(METHODS["quark"], OwnQuark)
    ours, options = METHODS["quark"](), {"dynamic": True} if group.startswith("vllm") else {}
    scheme = ours._get_scheme_from_config(layer_config("mi325x-w4a8"), **options)
    assert scheme == ("fp8_e4m3", bool(options))
    assert ours._get_scheme_cls_from_config(layer_config("mi325x-w4a8")) == "fp8_e4m3"
    for prefix, recipe in OwnQuark.declared.items():
        layer = SimpleNamespace(is_linear=True, scheme=PlainFp8())
        assert isinstance(ours.get_quant_method(layer, prefix), LinearMethod)
        assert type(layer.scheme) is (UnpackedInt4, PlainFp8)[recipe == "mi325x-fp8"]
    assert ours.get_quant_method(SimpleNamespace(is_linear=False), "model.embed_tokens") is None
