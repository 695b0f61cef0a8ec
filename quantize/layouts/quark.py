"""AMD Quark's layout, as Quark 0.13 exports it (real_quantized, `reorder` packing)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...recipes.schema import ActivationFormat, LayoutName, Recipe, WeightFormat
from ..errors import LayoutError
from ..safetensors_header import TensorInfo
from .base import StoredTensor, excluded_spellings, is_int4, stored_scalars

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics import QuantizedWeight

VERSION = "0.13"  # whose JSON this is


class QuarkLayout:
    """`weight` (int32 words or FP8), `weight_scale`, for INT4 an all-zero `weight_zero_point`."""

    name: LayoutName = "quark"

    def check(self, recipe: Recipe) -> None:
        """Quark expresses every format of the schema; see `Layout.check`."""

    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        """See `Layout.stored`."""
        rows, columns = weight.shape
        module = weight.name.removesuffix(".weight")
        if is_int4(recipe.weights):
            if rows % 8:
                raise LayoutError(
                    weight.name,
                    f"layout quark packs zero points of 8 rows into a word, got {rows} rows",
                    fix="keep this tensor, or use layout compressed-tensors",
                )
            tensors = [
                StoredTensor(name=weight.name, dtype="I32", shape=(rows, -(-columns // 8))),
                StoredTensor(name=f"{module}.weight_scale", dtype=weight.dtype, shape=(rows,)),
                StoredTensor(name=f"{module}.weight_zero_point", dtype="I32", shape=(rows // 8,)),
            ]
        else:
            shape = (rows,) if recipe.weights.granularity == "channel" else ()
            tensors = [
                StoredTensor(name=weight.name, dtype="F8_E4M3", shape=(rows, columns)),
                StoredTensor(name=f"{module}.weight_scale", dtype="F32", shape=shape),
            ]
        if recipe.needs_input_scales:
            tensors.append(StoredTensor(name=f"{module}.input_scale", dtype="F32", shape=()))
        return tuple(tensors)

    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor]":
        """See `Layout.encode_rows`."""
        codes = block.codes
        if is_int4(weights):
            from ..packing import int4_words

            codes = int4_words(codes, interleaved=True, offset=0)
        rows = {f"{module}.weight": codes}
        if weights.granularity == "channel":
            rows[f"{module}.weight_scale"] = block.scale[:, 0]
        return rows

    def encode_whole(
        self, weight: TensorInfo, scale: "Tensor", recipe: Recipe, input_scale: float | None
    ) -> "Mapping[str, Tensor]":
        """See `Layout.encode_whole`."""
        import torch

        whole = stored_scalars(weight, scale, recipe, input_scale, ())
        if is_int4(recipe.weights):
            module = weight.name.removesuffix(".weight")
            zero_points = torch.zeros(weight.shape[0] // 8, dtype=torch.int32)
            whole[f"{module}.weight_zero_point"] = zero_points
        return whole

    def declare(self, recipe: Recipe, kept: Sequence[str]) -> dict[str, Any]:
        """See `Layout.declare`."""
        return {
            "algo_config": None,
            "exclude": excluded_spellings(kept),
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": {
                "bias": None,
                "input_tensors": _activation_spec(recipe.activations),
                "output_tensors": None,
                "target_device": None,
                "weight": _weight_spec(recipe.weights),
            },
            "kv_cache_post_rope": False,
            "kv_cache_quant_config": {},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": VERSION,
        }

    def side_files(self, declared: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Layout.side_files`."""
        del declared
        return {}


def _weight_spec(weights: WeightFormat) -> dict[str, Any]:
    if is_int4(weights):
        return _spec(dtype="int4", axis=0, dynamic=False) | {
            "round_method": "half_even",
            "scale_type": "float",
            "symmetric": True,
            "zero_point_type": "int32",
        }
    return _spec(
        dtype="fp8_e4m3", axis=0 if weights.granularity == "channel" else None, dynamic=False
    )


def _activation_spec(activations: ActivationFormat | None) -> dict[str, Any] | None:
    if activations is None:
        return None
    axis = 1 if activations.granularity == "token" else None
    return _spec(dtype="fp8_e4m3", axis=axis, dynamic=activations.dynamic)


def _spec(*, dtype: str, axis: int | None, dynamic: bool) -> dict[str, Any]:
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
        "observer_cls": "PerTensorMinMaxObserver" if axis is None else "PerChannelMinMaxObserver",
        "qscheme": "per_tensor" if axis is None else "per_channel",
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": None,
        "scale_type": "float32",
        "symmetric": True,
        "zero_point_type": "int32",
    }
