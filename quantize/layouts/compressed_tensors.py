"""The compressed-tensors layout (version 0.20): INT4, FP8, NVFP4 and MXFP4."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...recipes.schema import ActivationFormat, LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import StoredTensor, TensorInfo
from .base import (
    Columns,
    check_divides,
    excluded_spellings,
    exponent_bytes,
    scalar,
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
_TOKEN, _TENSOR = "fp8_e4m3 per token, dynamic", "fp8_e4m3 per tensor, static"
_GROUP = "fp8_e4m3 per group, dynamic"
_ACTIVATIONS: dict[tuple[str, str], tuple[str | None, ...]] = {
    ("int4", "channel"): (None,),
    ("int4", "group"): (None, _TOKEN),
    ("fp8_e4m3", "channel"): (None, _TOKEN, _TENSOR),
    ("fp8_e4m3", "tensor"): (None, _TOKEN, _TENSOR),
    ("fp8_e4m3", "block"): (_GROUP,),
    ("nvfp4", "group"): (None, "nvfp4 per group, dynamic"),
    ("mxfp4", "group"): (None,),
}
"""Activations that a weight format may be paired with."""


class CompressedTensorsLayout:
    """`weight` (FP8) or `weight_packed`; `weight_scale` [out, groups], [1] for a whole matrix.

    That of blocks is [out / 128, in / 128]. INT4 adds `weight_shape`; NVFP4 `weight_global_scale`
    and `input_global_scale`, which divide.
    """

    name: LayoutName = "compressed-tensors"
    exact_excludes = False
    exclude_keys: tuple[str, ...] = ("ignore",)

    def problem(self, recipe: Recipe) -> str | None:
        """See `Layout.problem`."""
        weights = recipe.weights
        if weights.first_stage:
            return "compressed-tensors has no weights of two stages"
        wanted = None if recipe.activations is None else str(recipe.activations)
        if wanted not in _ACTIVATIONS[weights.dtype, weights.granularity]:
            return "no engine has a scheme for this pair in compressed-tensors"
        return None

    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        """See `Layout.stored`."""
        rows, columns = weight.shape
        weights, module = recipe.weights, weight.name.removesuffix(".weight")
        if weights.group_size:
            check_divides(self.name, weight, 1, weights.group_size)
        groups = columns // weights.group_size if weights.group_size else 1
        scale_dtype = {
            "int4": "F16" if weights.scale_dtype else weight.dtype,
            "fp8_e4m3": "F32",
            "nvfp4": "F8_E4M3",
            "mxfp4": "U8",
        }[weights.dtype]
        codes = {
            "int4": ("weight_packed", "I32", (rows, -(-columns // 8))),
            "fp8_e4m3": ("weight", "F8_E4M3", (rows, columns)),
            "nvfp4": ("weight_packed", "U8", (rows, columns // 2)),
            "mxfp4": ("weight_packed", "U8", (rows, columns // 2)),
        }[weights.dtype]
        scale_shape = {
            "tensor": (1,),
            "block": (-(-rows // (weights.group_size or 1)), groups),
        }.get(weights.granularity, (rows, groups))
        parts: list[tuple[str, str, tuple[int, ...]]] = [
            codes,
            ("weight_scale", scale_dtype, scale_shape),
        ]
        if weights.dtype == "int4":
            parts.append(("weight_shape", "I64", (2,)))
        if weights.dtype == "nvfp4":
            parts.append(("weight_global_scale", "F32", (1,)))
        if recipe.needs_input_scales:
            parts.append((_input_scale(recipe), "F32", (1,)))
        return tuple(
            StoredTensor(name=f"{module}.{suffix}", dtype=dtype, shape=shape)
            for suffix, dtype, shape in parts
        )

    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor | Columns]":
        """See `Layout.encode_rows`."""
        from ..numerics.packing import fp4_bytes, int4_words

        name = f"{module}.weight_packed"
        rows: dict[str, Tensor | Columns]
        if weights.dtype == "int4":
            rows = {name: int4_words(block.codes, interleaved=False, offset=8)}
        elif weights.dtype == "fp8_e4m3":
            rows = {f"{module}.weight": block.codes}
        else:
            rows = {name: fp4_bytes(block.codes)}
        if weights.granularity != "tensor":
            mx = weights.dtype == "mxfp4"
            rows[f"{module}.weight_scale"] = exponent_bytes(block.scale) if mx else block.scale
        return rows

    def encode_whole(
        self,
        weight: TensorInfo,
        block: "QuantizedWeight",
        recipe: Recipe,
        input_scale: float | None,
    ) -> "Mapping[str, Tensor]":
        """See `Layout.encode_whole`."""
        import torch

        module = weight.name.removesuffix(".weight")
        whole = {}
        if recipe.weights.dtype == "int4":
            whole[f"{module}.weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        if recipe.weights.granularity == "tensor":
            whole[f"{module}.weight_scale"] = scalar(block.scale, (1,))
        if block.global_scale is not None:
            whole[f"{module}.weight_global_scale"] = scalar(1 / block.global_scale, (1,))
        if input_scale is not None:
            divides = recipe.weights.dtype == "nvfp4"
            value = 1 / scalar(input_scale, (1,)) if divides else scalar(input_scale, (1,))
            whole[f"{module}.{_input_scale(recipe)}"] = value
        return whole

    def excludes(self, kept: Sequence[str]) -> list[str]:
        """See `Layout.excludes`."""
        return excluded_spellings(kept)

    def declare(self, recipe: Recipe, kept: Sequence[str]) -> dict[str, Any]:
        """See `Layout.declare`."""
        form = FORMATS[recipe.weights.dtype]
        group = {
            "format": form,
            "input_activations": _activations(recipe.activations),
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _weights(recipe.weights),
        }
        return {
            "config_groups": {"group_0": group},
            "format": form,
            "global_compression_ratio": None,
            "ignore": self.excludes(kept),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }

    def side_files(self, declared: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Layout.side_files`."""
        del declared
        return {}


def _input_scale(recipe: Recipe) -> str:
    return "input_global_scale" if recipe.weights.dtype == "nvfp4" else "input_scale"


def _weights(weights: WeightFormat) -> dict[str, Any]:
    strategy = "tensor_group" if weights.dtype == "nvfp4" else weights.granularity
    blocks = weights.granularity == "block"
    structure = {"block_structure": [weights.group_size, weights.group_size]} if blocks else {}
    return structure | _args(
        bits=8 if weights.dtype == "fp8_e4m3" else 4,
        kind="int" if weights.dtype == "int4" else "float",
        strategy=strategy,
        group_size=None if blocks else weights.group_size,
        dynamic=False,
    )


def _activations(activations: ActivationFormat | None) -> dict[str, Any] | None:
    if activations is None:
        return None
    if activations.dtype == "nvfp4":
        return _args(bits=4, kind="float", strategy="tensor_group", group_size=16, dynamic="local")
    return _args(
        bits=8,
        kind="float",
        strategy=activations.granularity,
        group_size=128 if activations.granularity == "group" else None,
        dynamic=activations.dynamic,
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
