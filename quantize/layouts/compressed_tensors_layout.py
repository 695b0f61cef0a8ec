"""The compressed-tensors layout (version 0.20): INT4, FP8, NVFP4 and MXFP4."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...recipes.formats import NUMBER_FORMATS, KvCacheFormat
from ...recipes.schema import ActivationFormat, LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import StoredTensor, TensorInfo
from .layout import (
    Columns,
    Heads,
    Layout,
    OwnFormat,
    check_divides,
    codes_tensor,
    name_patterns,
    scalar,
    scale_dtype,
    stored_scale,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight

FORMATS = {
    "int4": "pack-quantized",
    "fp8_e4m3": "float-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}
MIXED = "mixed-precision"
"""What stands for the format where groups have several."""
_TOKEN, _TENSOR = "fp8_e4m3 per token, dynamic", "fp8_e4m3 per tensor, static"
_GROUP = "fp8_e4m3 per group, dynamic"
_ACTIVATIONS: dict[tuple[str, str], tuple[str | None, ...]] = {
    ("int4", "channel"): (None,),
    ("int4", "group"): (None, _TOKEN),
    ("fp8_e4m3", "channel"): (None, _TOKEN, _TENSOR),
    ("fp8_e4m3", "tensor"): (None, _TOKEN, _TENSOR),
    ("fp8_e4m3", "block"): (_GROUP,),
    ("nvfp4", "group"): (None, "nvfp4 per group, dynamic under one static scale"),
    ("mxfp4", "group"): (None,),
}
"""Activations that a weight format may be paired with."""


class CompressedTensorsLayout(Layout):
    """`weight` (FP8) or `weight_packed`; `weight_scale` [out, groups], [1] for a whole matrix.

    That of blocks is [out / 128, in / 128]. INT4 adds `weight_shape`; NVFP4 `weight_global_scale`
    and `input_global_scale`, which divide.
    """

    name: LayoutName = "compressed-tensors"
    mix_problem: str | None = None
    heads: Heads = "named"
    cache_problem = None
    cache_scale_shape = (1,)

    @override
    def problem(self, recipe: Recipe) -> str | None:
        weights = recipe.weights
        if weights.first_stage:
            return "compressed-tensors has no weights that are rounded in two stages"
        wanted = None if recipe.activations is None else str(recipe.activations)
        if wanted not in _ACTIVATIONS[weights.dtype, weights.granularity]:
            return (
                "no engine has a scheme for this pair of weights and activations in"
                " compressed-tensors"
            )
        return None

    @override
    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        rows, columns = weight.shape
        weights, module = recipe.weights, weight.name.removesuffix(".weight")
        if weights.group_size:
            check_divides(self.name, weight, 1, weights.group_size)
        number = weights.number
        groups = columns // weights.group_size if weights.group_size else 1
        scale_shape = {
            "tensor": (1,),
            "block": (-(-rows // (weights.group_size or 1)), groups),
        }.get(weights.granularity, (rows, groups))
        parts: list[tuple[str, str, tuple[int, ...]]] = [
            ("weight_scale", scale_dtype(weight, weights), scale_shape),
        ]
        if weights.number.is_integer:
            parts.append(("weight_shape", "I64", (2,)))
        if number.global_scale:
            parts.append(("weight_global_scale", "F32", (1,)))
        if recipe.needs_input_scales:
            parts.append((_input_scale(recipe), "F32", (1,)))
        return (
            codes_tensor(_codes(module, weights), weight, weights),
            *(
                StoredTensor(name=f"{module}.{suffix}", dtype=dtype, shape=shape)
                for suffix, dtype, shape in parts
            ),
        )

    @override
    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor | Columns]":
        from ..numerics.quantized_weight import packed

        codes = packed(weights.dtype, block.codes, interleaved=False, offset=8)
        rows: dict[str, Tensor | Columns] = {_codes(module, weights): codes}
        if weights.granularity != "tensor":
            rows[f"{module}.weight_scale"] = stored_scale(block.scale, weights)
        return rows

    @override
    def encode_whole(
        self,
        weight: TensorInfo,
        block: "QuantizedWeight",
        recipe: Recipe,
        input_scale: float | None,
    ) -> "dict[str, Tensor]":
        import torch

        module = weight.name.removesuffix(".weight")
        whole = {}
        if recipe.weights.number.is_integer:
            whole[f"{module}.weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        if recipe.weights.granularity == "tensor":
            whole[f"{module}.weight_scale"] = scalar(block.scale, (1,))
        if block.global_scale is not None:
            whole[f"{module}.weight_global_scale"] = scalar(1 / block.global_scale, (1,))
        if input_scale is not None:
            divides = recipe.weights.number.global_scale
            value = 1 / scalar(input_scale, (1,)) if divides else scalar(input_scale, (1,))
            whole[f"{module}.{_input_scale(recipe)}"] = value
        return whole

    @override
    def declare(
        self, recipe: Recipe, kept: Sequence[str], own: Sequence[OwnFormat] = ()
    ) -> dict[str, Any]:
        # Both engines look for the name of a linear first, in the order of the groups, then for its
        # class, so `Linear` is every other one. A head is found by its name alone: its class,
        # ParallelLMHead, has no "Linear" in it
        groups = {"group_0": _group(recipe, ["Linear"])}
        for index, each in enumerate(own, start=1):
            groups[f"group_{index}"] = _group(each.recipe, name_patterns(each.leaves))
        forms = {group["format"] for group in groups.values()}
        return {
            "config_groups": groups,
            "format": forms.pop() if len(forms) == 1 else MIXED,
            "global_compression_ratio": None,
            "ignore": self.excludes(kept),
            "kv_cache_scheme": _cache_scheme(recipe.kv_cache),
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }


def _cache_scheme(cache: KvCacheFormat | None) -> dict[str, Any] | None:
    if cache is None:
        return None
    number = NUMBER_FORMATS[cache.dtype]
    return _args(bits=number.bits, kind=number.kind, strategy="tensor", dynamic=False)


def _group(recipe: Recipe, targets: list[str]) -> dict[str, Any]:
    return {
        "format": FORMATS[recipe.weights.dtype],
        "input_activations": _activations(recipe.activations),
        "output_activations": None,
        "targets": targets,
        "weights": _weights(recipe.weights),
    }


def _codes(module: str, weights: WeightFormat) -> str:
    packed = weights.number.codes_per_element > 1
    return f"{module}.weight_packed" if packed else f"{module}.weight"


def _input_scale(recipe: Recipe) -> str:
    whole = recipe.weights.number.global_scale
    return "input_global_scale" if whole else "input_scale"


def _weights(weights: WeightFormat) -> dict[str, Any]:
    number, blocks = weights.number, weights.granularity == "block"
    structure = {"block_structure": [weights.group_size, weights.group_size]} if blocks else {}
    return structure | _args(
        bits=number.bits,
        kind=number.kind,
        strategy="tensor_group" if number.global_scale else weights.granularity,
        group_size=None if blocks else weights.group_size,
        dynamic=False,
    )


def _activations(activations: ActivationFormat | None) -> dict[str, Any] | None:
    if activations is None:
        return None
    number = NUMBER_FORMATS[activations.dtype]
    size = None
    if activations.granularity == "group":  # of FP8: one side of a block
        (size,) = number.sizes["group" if number.only_groups else "block"]
    return _args(
        bits=number.bits,
        kind=number.kind,
        strategy="tensor_group" if number.global_scale else activations.granularity,
        group_size=size,
        dynamic="local" if number.global_scale else activations.dynamic,
    )


def _args(
    *, bits: int, kind: str, strategy: str, dynamic: bool | str, group_size: int | None = None
) -> dict[str, Any]:
    return {
        "dynamic": dynamic,
        "group_size": group_size,
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
    }
