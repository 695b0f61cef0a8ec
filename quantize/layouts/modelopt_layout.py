"""NVIDIA ModelOpt's layout (0.47), and plain `fp8`.

ModelOpt: FP8 per matrix, or per channel and token; NVFP4. Plain: one scale per matrix, or per
128 x 128 block as DeepSeek-V3 is published; sources: vLLM 0.33 and SGLang 0.5.23 `fp8.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.stored_modelopt import algorithm_of
from .layout import (
    Encoded,
    Layout,
    Parts,
    check_divides,
    codes_part,
    last_parts,
    scalar,
    scale_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight


class ModelOptLayout(Layout):
    """`weight` FP8, `weight_scale` [] or [out]; NVFP4: packed, with `weight_scale_2` [].

    `input_scale` [] where one is stored.
    """

    name: LayoutName = "modelopt"
    # vLLM 0.33 has `model.layers.61.mlp.down_proj`, SGLang 0.5.23 `model.down_proj`, or no `model`.
    mix_problem: str | None = (
        "ModelOpt's layout declares several formats by whole names of linears"
        " (MIXED_PRECISION), but engines have names of their own for a draft's"
        " linears"
    )
    cache_problem = None

    @override
    def problem(self, recipe: Recipe) -> str | None:
        if algorithm_of(recipe) is None:
            return "ModelOpt's layout holds FP8 and NVFP4 only, each with inputs of the same format"
        return None

    @override
    def parts(self, weight: TensorInfo, recipe: Recipe) -> Parts:
        weights, (rows, columns) = recipe.weights, weight.shape
        shape: tuple[int, ...] = (rows,) if weights.granularity == "channel" else ()
        if weights.group_size is not None:
            check_divides(self.name, weight, 1, weights.group_size)
            shape = (rows, columns // weights.group_size)
        scales = scale_dtype(weight, weights), shape
        parts = {"weight": codes_part(weight, weights), "weight_scale": scales}
        if weights.number.global_scale:
            parts["weight_scale_2"] = "F32", ()
        if recipe.needs_input_scales:
            parts["input_scale"] = "F32", ()
        return parts

    @override
    def rows(self, block: "QuantizedWeight", weights: WeightFormat) -> Encoded:
        from ..numerics.quantized_weight import packed

        rows = {"weight": packed(weights.dtype, block.codes, interleaved=False, offset=0)}
        if weights.granularity == "group":
            rows["weight_scale"] = block.scale
        elif weights.granularity == "channel":
            rows["weight_scale"] = block.scale[:, 0]
        return rows

    @override
    def whole(
        self, weight: TensorInfo, block: "QuantizedWeight", recipe: Recipe, scale: float | None
    ) -> "dict[str, Tensor]":
        whole = super().whole(weight, block, recipe, scale)
        if block.global_scale is not None:
            whole["weight_scale_2"] = scalar(block.global_scale, ())
        return whole

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # Engines match these as wildcards against runtime names, so the last part of a name between
        # two stars is enough; ModelOpt's own `model*` would match every layer of the draft
        return [f"*{leaf}*" for leaf in last_parts(kept)]

    @override
    def cache_scale_names(self, attention: str) -> tuple[str, str]:
        return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"


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
    def parts(self, weight: TensorInfo, recipe: Recipe) -> Parts:
        parts: Parts = {"weight": ("F8_E4M3", weight.shape)}
        size = recipe.weights.group_size
        if size is not None:
            blocks = (-(-weight.shape[0] // size), -(-weight.shape[1] // size))
            return parts | {"weight_scale_inv": ("F32", blocks)}
        parts["weight_scale"] = "F32", ()
        if recipe.needs_input_scales:
            parts["input_scale"] = "F32", ()
        return parts

    @override
    def rows(self, block: "QuantizedWeight", weights: WeightFormat) -> Encoded:
        scales = {"weight_scale_inv": block.scale} if weights.granularity == "block" else {}
        return {"weight": block.codes, **scales}

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # vLLM compares whole names, so both spellings of each are listed; SGLang looks for parts
        bare = [module.removeprefix("model.") for module in kept]
        return sorted({*bare, *(f"model.{module}" for module in bare), *last_parts(kept)})
