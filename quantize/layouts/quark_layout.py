"""AMD Quark's layout, as Quark 0.13 exports it (real_quantized, `reorder` packing)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...recipes.errors import LayoutError
from ...recipes.formats import NUMBER_FORMATS
from ...recipes.schema import ActivationFormat, LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import StoredTensor, TensorInfo
from .layout import (
    Columns,
    Layout,
    OwnFormat,
    check_divides,
    codes_tensor,
    scalar,
    scale_dtype,
    stored_scale,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight

VERSION = "0.13"  # whose JSON this is
_INT4_PER_WORD = 8
_SECOND_STAGE = "_2"

_CACHED = ("*k_proj", "*v_proj")
"""Linears whose outputs go into the KV cache: Quark's `LLMTemplate` names them so."""

_HELD = ("int4", "fp8_e4m3", "mxfp4")
"""Formats that it has."""


class QuarkLayout(Layout):
    """`weight` and `weight_scale`, for INT4 an all-zero `weight_zero_point` too.

    Of two stages `weight_scale` [] is the first one's, `_2` the second one's scale and zero point.
    INT4 per channel is [out, in / 8] int32, INT4 groups are transposed, [in, out / 8], with scales
    [groups, out]; MXFP4 is [out, in / 2] bytes with [out, in / 32] exponents.
    """

    name: LayoutName = "quark"
    cache_problem = None

    @override
    def problem(self, recipe: Recipe) -> str | None:
        weights, activations = recipe.weights, recipe.activations
        if weights.dtype not in _HELD or weights.granularity == "block":
            return "Quark 0.13 does not have these weights"
        if activations is not None and activations.dtype not in ("fp8_e4m3", weights.dtype):
            return "Quark 0.13 pairs MXFP4 activations with MXFP4 weights only"
        if activations and activations.dtype == "fp8_e4m3" and activations.granularity == "group":
            return "Quark 0.13 has no FP8 activations in groups"
        return None

    @override
    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        module = weight.name.removesuffix(".weight")
        parts = _int4_parts if recipe.weights.number.is_integer else _float_parts
        tensors = [
            StoredTensor(name=f"{module}.{suffix}", dtype=dtype, shape=shape)
            for suffix, dtype, shape in parts(weight, recipe.weights)
        ]
        if recipe.needs_input_scales:
            tensors.append(StoredTensor(name=f"{module}.input_scale", dtype="F32", shape=()))
        return tuple(tensors)

    @override
    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor | Columns]":
        from ..numerics.quantized_weight import packed

        codes, scale = f"{module}.weight", f"{module}.weight_scale"
        if weights.first_stage:
            scale += _SECOND_STAGE
        if weights.number.is_integer and weights.granularity == "group":
            words = packed(weights.dtype, block.codes.T, interleaved=True, offset=0)
            return {codes: Columns(words), scale: Columns(block.scale.T)}
        rows: dict[str, Tensor | Columns] = {
            codes: packed(weights.dtype, block.codes, interleaved=True, offset=0)
        }
        if weights.granularity == "group":
            rows[scale] = stored_scale(block.scale, weights)
        elif weights.granularity == "channel":
            rows[scale] = block.scale[:, 0]
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
        whole = super().encode_whole(weight, block, recipe, input_scale)
        if block.global_scale is not None:
            whole[f"{module}.weight_scale"] = scalar(block.global_scale, ())
        for tensor in self.stored(weight, recipe):
            if tensor.name.startswith(f"{module}.weight_zero_point"):
                whole[tensor.name] = torch.zeros(tensor.shape, dtype=torch.int32)
        return whole

    @override
    def declare(
        self, recipe: Recipe, kept: Sequence[str], own: Sequence[OwnFormat] = ()
    ) -> dict[str, Any]:
        linear = {
            "bias": None,
            "input_tensors": _activation_spec(recipe.activations),
            "output_tensors": None,
            "target_device": None,
            "weight": _weight_spec(recipe.weights),
        }
        cached: dict[str, Any] = {}
        if recipe.kv_cache is not None:  # what these linears make, rounded under one scale
            spec = _spec(recipe.kv_cache.dtype, "tensor", axis=None, dynamic=False)
            cached = {name: {**linear, "output_tensors": spec} for name in _CACHED}
        return {
            "algo_config": None,
            "exclude": self.excludes(kept),
            "export": {
                "kv_cache_group": list(cached),
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": linear,
            "kv_cache_post_rope": False,
            "kv_cache_quant_config": cached,
            "layer_quant_config": cached,
            "layer_type_quant_config": {},
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": VERSION,
        }


Parts = list[tuple[str, str, tuple[int, ...]]]
"""Suffix, safetensors dtype and shape of the tensors of one weight."""


def _int4_parts(weight: TensorInfo, weights: WeightFormat) -> Parts:
    rows, columns = weight.shape
    if rows % _INT4_PER_WORD:
        raise LayoutError(
            weight.name,
            f"layout quark packs zero points of 8 rows into a word, got {rows} rows",
            fix="keep this tensor, or use layout compressed-tensors",
        )
    scales = scale_dtype(weight, weights)
    words = rows // _INT4_PER_WORD
    if weights.first_stage:
        return [
            ("weight", "I32", (rows, -(-columns // _INT4_PER_WORD))),
            ("weight_scale", "F32", ()),
            (f"weight_scale{_SECOND_STAGE}", "F32", (rows,)),
            (f"weight_zero_point{_SECOND_STAGE}", "I32", (words,)),
        ]
    if weights.group_size is None:
        return [
            ("weight", "I32", (rows, -(-columns // _INT4_PER_WORD))),
            ("weight_scale", scales, (rows,)),
            ("weight_zero_point", "I32", (words,)),
        ]
    check_divides("quark", weight, 1, weights.group_size)
    groups = columns // weights.group_size
    return [
        ("weight", "I32", (columns, words)),
        ("weight_scale", scales, (groups, rows)),
        ("weight_zero_point", "I32", (groups, words)),
    ]


def _float_parts(weight: TensorInfo, weights: WeightFormat) -> Parts:
    rows, columns = weight.shape
    codes = codes_tensor(weight.name, weight, weights)
    shape: tuple[int, ...] = (rows,) if weights.granularity == "channel" else ()
    if weights.group_size is not None:
        check_divides("quark", weight, 1, weights.group_size)
        shape = (rows, columns // weights.group_size)
    return [
        ("weight", codes.dtype, codes.shape),
        ("weight_scale", scale_dtype(weight, weights), shape),
    ]


def _weight_spec(weights: WeightFormat) -> dict[str, Any] | list[dict[str, Any]]:
    if weights.first_stage:  # a list of stages, both with float32 scales
        return [
            _spec(weights.first_stage, "tensor", axis=None, dynamic=False),
            _spec(weights.dtype, weights.granularity, axis=0, dynamic=False),
        ]
    if weights.number.is_integer:
        return _spec(weights.dtype, weights.granularity, dynamic=False, axis=0) | {
            "group_size": weights.group_size,
            "round_method": "half_even",
            "scale_type": weights.scale_dtype or "float",
            "symmetric": True,
            "zero_point_type": "int32",
        }
    if weights.number.powers_of_two:
        return _mx_spec(dynamic=False)
    axis = 0 if weights.granularity == "channel" else None
    return _spec("fp8_e4m3", weights.granularity, axis=axis, dynamic=False)


def _activation_spec(activations: ActivationFormat | None) -> dict[str, Any] | None:
    if activations is None:
        return None
    if activations.dtype == "mxfp4":
        return _mx_spec(dynamic=True)
    # Quark spells "per token" as per_channel along the axis of tokens.
    token = activations.granularity == "token"
    return _spec(
        "fp8_e4m3",
        "channel" if token else "tensor",
        axis=1 if token else None,
        dynamic=activations.dynamic,
    )


def _mx_spec(*, dynamic: bool) -> dict[str, Any]:
    (size,) = NUMBER_FORMATS["mxfp4"].sizes["group"]
    return _spec("fp4", "group", axis=-1, dynamic=dynamic) | {
        "group_size": size,
        "observer_cls": "PerBlockMXObserver",
        "scale_calculation_mode": "even",
        "scale_format": "e8m0",
        "scale_type": "float",
        "symmetric": None,
    }


def _spec(dtype: str, granularity: str, *, axis: int | None, dynamic: bool) -> dict[str, Any]:
    """One QTensorConfig of Quark 0.13; `axis` None means one scale for the tensor."""
    return {
        "block_size": None,
        "ch_axis": axis,
        "dtype": dtype,
        "enable_buffer_reuse": False,
        "group_size": None,
        "is_dynamic": dynamic,
        "is_scale_quant": False,
        "max_input_numel": 4194304,
        "mx_element_dtype": None,
        "observer_cls": f"Per{granularity.capitalize()}MinMaxObserver",
        "qscheme": f"per_{granularity}",
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": None,
        "scale_type": "float32",
        "symmetric": True,
        "zero_point_type": "int32",
    }
