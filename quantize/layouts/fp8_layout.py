"""The plain `fp8` layout: one scale per matrix, or per 128 x 128 block as DeepSeek-V3 is published.

Sources: vLLM 0.33 and SGLang 0.5.23 `fp8.py`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import StoredTensor, TensorInfo
from .layout import Columns, Layout, OwnFormat, last_parts

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight


class Fp8Layout(Layout):
    """`weight` FP8; `weight_scale` [] and `input_scale` [], or `weight_scale_inv` per block.

    Despite its name `weight_scale_inv` multiplies the codes, as every scale here.
    """

    name: LayoutName = "fp8"
    exact_excludes = True
    cache_problem = None

    @override
    def problem(self, recipe: Recipe) -> str | None:
        weights, activations = recipe.weights, recipe.activations
        if not weights.number.is_fp8 or weights.granularity not in ("tensor", "block"):
            return "plain fp8 stores FP8 weights with one scale per matrix or per block only"
        if activations is None or activations.dtype != "fp8_e4m3":
            return "plain fp8 needs FP8 activations"
        if (weights.granularity == "block") != (activations.granularity == "group"):
            return "plain fp8 pairs blocks of the weight with groups of the activations"
        return None

    @override
    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        module = weight.name.removesuffix(".weight")
        codes = StoredTensor(name=weight.name, dtype="F8_E4M3", shape=weight.shape)
        size = recipe.weights.group_size
        if size is not None:
            blocks = (-(-weight.shape[0] // size), -(-weight.shape[1] // size))
            scale = StoredTensor(name=f"{module}.weight_scale_inv", dtype="F32", shape=blocks)
            return codes, scale
        tensors = [codes, StoredTensor(name=f"{module}.weight_scale", dtype="F32", shape=())]
        if recipe.needs_input_scales:
            tensors.append(StoredTensor(name=f"{module}.input_scale", dtype="F32", shape=()))
        return tuple(tensors)

    @override
    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor | Columns]":
        rows: dict[str, Tensor | Columns] = {f"{module}.weight": block.codes}
        if weights.granularity == "block":
            rows[f"{module}.weight_scale_inv"] = block.scale
        return rows

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # vLLM compares whole names, so both spellings of each are listed; SGLang looks for parts
        bare = [module.removeprefix("model.") for module in kept]
        return sorted({*bare, *(f"model.{module}" for module in bare), *last_parts(kept)})

    @override
    def declare(
        self, recipe: Recipe, kept: Sequence[str], own: Sequence[OwnFormat] = ()
    ) -> dict[str, Any]:
        ignored = self.excludes(kept)
        scheme = "static" if recipe.needs_input_scales else "dynamic"
        declared: dict[str, Any] = {
            "activation_scheme": scheme,
            "ignored_layers": ignored,
            "modules_to_not_convert": ignored,
            "quant_method": "fp8",
        }
        if recipe.kv_cache is not None:  # as AutoFP8 says it; engines ask their command line
            declared["kv_cache_scheme"] = "static"
        size = recipe.weights.group_size
        return declared | ({"fmt": "e4m3", "weight_block_size": [size, size]} if size else {})
