"""The compressed-tensors layout (version 0.20): `pack-quantized` INT4 and `float-quantized` FP8."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..safetensors_header import TensorInfo
from .base import (
    StoredTensor,
    excluded_spellings,
    is_int4,
    refuse,
    stored_scalars,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics import QuantizedWeight


class CompressedTensorsLayout:
    """`weight_packed` and `weight_shape` (INT4) or `weight` (FP8); `weight_scale` [out, 1], [1]."""

    name: LayoutName = "compressed-tensors"

    def check(self, recipe: Recipe) -> None:
        """See `Layout.check`: no stock kernel pairs per-channel INT4 with FP8 activations."""
        if is_int4(recipe.weights) and recipe.activations is not None:
            raise refuse(
                self.name,
                "INT4 per-channel weights with FP8 activations load in no engine in this layout",
                able=("quark",),
            )

    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        """See `Layout.stored`."""
        rows, columns = weight.shape
        module = weight.name.removesuffix(".weight")
        scale = f"{module}.weight_scale"
        if is_int4(recipe.weights):
            packed = (rows, -(-columns // 8))
            return (
                StoredTensor(name=f"{module}.weight_packed", dtype="I32", shape=packed),
                StoredTensor(name=scale, dtype=weight.dtype, shape=(rows, 1)),
                StoredTensor(name=f"{module}.weight_shape", dtype="I64", shape=(2,)),
            )
        shape = (rows, 1) if recipe.weights.granularity == "channel" else (1,)
        tensors = [
            StoredTensor(name=weight.name, dtype="F8_E4M3", shape=(rows, columns)),
            StoredTensor(name=scale, dtype="F32", shape=shape),
        ]
        if recipe.needs_input_scales:
            tensors.append(StoredTensor(name=f"{module}.input_scale", dtype="F32", shape=(1,)))
        return tuple(tensors)

    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor]":
        """See `Layout.encode_rows`."""
        if is_int4(weights):
            from ..packing import int4_words

            words = int4_words(block.codes, interleaved=False, offset=8)
            return {f"{module}.weight_packed": words, f"{module}.weight_scale": block.scale}
        rows = {f"{module}.weight": block.codes}
        if weights.granularity == "channel":
            rows[f"{module}.weight_scale"] = block.scale
        return rows

    def encode_whole(
        self, weight: TensorInfo, scale: "Tensor", recipe: Recipe, input_scale: float | None
    ) -> "Mapping[str, Tensor]":
        """See `Layout.encode_whole`."""
        import torch

        whole = stored_scalars(weight, scale, recipe, input_scale, (1,))
        if is_int4(recipe.weights):
            module = weight.name.removesuffix(".weight")
            whole[f"{module}.weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        return whole

    def declare(self, recipe: Recipe, kept: Sequence[str]) -> dict[str, Any]:
        """See `Layout.declare`."""
        weights, activations = recipe.weights, recipe.activations
        int4 = is_int4(weights)
        form = "pack-quantized" if int4 else "float-quantized"
        rounding = None
        if activations is not None:
            rounding = _args(
                bits=8, kind="float", strategy=activations.granularity, dynamic=activations.dynamic
            )
        group = {
            "format": form,
            "input_activations": rounding,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _args(
                bits=4 if int4 else 8,
                kind="int" if int4 else "float",
                strategy=weights.granularity,
                dynamic=False,
            ),
        }
        return {
            "config_groups": {"group_0": group},
            "format": form,
            "global_compression_ratio": None,
            "ignore": excluded_spellings(kept),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }

    def side_files(self, declared: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Layout.side_files`."""
        del declared
        return {}


def _args(*, bits: int, kind: str, strategy: str, dynamic: bool) -> dict[str, Any]:
    return {
        "dynamic": dynamic,
        "group_size": None,
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
    }
