"""The compressed-tensors layout (version 0.20): INT4, FP8, NVFP4 and MXFP4."""

from typing import TYPE_CHECKING

from typing_extensions import override

from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import TensorInfo
from .layout import (
    Encoded,
    Layout,
    Parts,
    check_divides,
    codes_part,
    scalar,
    scale_dtype,
    stored_scale,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight

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
    def parts(self, weight: TensorInfo, recipe: Recipe) -> Parts:
        weights, number, (rows, columns) = recipe.weights, recipe.weights.number, weight.shape
        if weights.group_size:
            check_divides(self.name, weight, 1, weights.group_size)
        groups = columns // weights.group_size if weights.group_size else 1
        blocks = -(-rows // (weights.group_size or 1)), groups
        shapes: dict[str, tuple[int, ...]] = {"tensor": (1,), "block": blocks}
        shape = shapes.get(weights.granularity, (rows, groups))
        parts = {
            _codes(weights): codes_part(weight, weights),
            "weight_scale": (scale_dtype(weight, weights), shape),
        }
        if number.is_integer:
            parts["weight_shape"] = "I64", (2,)
        if number.global_scale:
            parts["weight_global_scale"] = "F32", (1,)
        if recipe.needs_input_scales:
            parts[_input_scale(weights)] = "F32", (1,)
        return parts

    @override
    def rows(self, block: "QuantizedWeight", weights: WeightFormat) -> Encoded:
        from ..numerics.quantized_weight import packed

        rows = {_codes(weights): packed(weights.dtype, block.codes, interleaved=False, offset=8)}
        if weights.granularity != "tensor":
            rows["weight_scale"] = stored_scale(block.scale, weights)
        return rows

    @override
    def whole(
        self, weight: TensorInfo, block: "QuantizedWeight", recipe: Recipe, scale: float | None
    ) -> "dict[str, Tensor]":
        import torch

        weights, whole = recipe.weights, {}
        if weights.number.is_integer:
            whole["weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        if weights.granularity == "tensor":
            whole["weight_scale"] = scalar(block.scale, (1,))
        if block.global_scale is not None:
            whole["weight_global_scale"] = scalar(1 / block.global_scale, (1,))
        if scale is not None:
            value = scalar(scale, (1,))
            whole[_input_scale(weights)] = 1 / value if weights.number.global_scale else value
        return whole


def _codes(weights: WeightFormat) -> str:
    return "weight_packed" if weights.number.codes_per_element > 1 else "weight"


def _input_scale(weights: WeightFormat) -> str:
    return "input_global_scale" if weights.number.global_scale else "input_scale"
