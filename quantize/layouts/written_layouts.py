"""How each layout that is written names, packs and excludes.

Quark as Quark 0.13 exports it (real_quantized, `reorder` packing); compressed-tensors 0.20;
ModelOpt 0.47. Plain `fp8` has one scale per matrix, or per 128 x 128 block as DeepSeek-V3 is
published; AutoAWQ (`gemm`) INT4 groups, transposed, with float16 scales and the constant zero point
8. Sources: `fp8.py` and `awq.py` of vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from ...recipes.errors import LayoutError
from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.stored_modelopt import algorithm_of
from .layout import Columns, Encoded, Layout, check_divides, last_parts, scalar, stored_scale

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight


class CompressedTensorsLayout(Layout):
    """Scales of a whole matrix are [1]; those over others, and of NVFP4's inputs, divide."""

    name: LayoutName = "compressed-tensors"
    mix_problem: str | None = None
    cache_problem = None
    cache_scale_shape = (1,)

    @override
    def check_shape(self, weight: TensorInfo, weights: WeightFormat) -> None:
        if weights.group_size:
            check_divides(self.name, weight, 1, weights.group_size)

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


class ModelOptLayout(Layout):
    """FP8 and NVFP4; what is once is []."""

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
    """Despite its name `weight_scale_inv`, of blocks, multiplies the codes, as every scale here."""

    name: LayoutName = "fp8"
    exact_excludes = True
    cache_problem = None

    @override
    def rows(self, block: "QuantizedWeight", weights: WeightFormat) -> Encoded:
        scales = {"weight_scale_inv": block.scale} if weights.granularity == "block" else {}
        return {"weight": block.codes, **scales}

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # vLLM compares whole names, so both spellings of each are listed; SGLang looks for parts
        bare = [module.removeprefix("model.") for module in kept]
        return sorted({*bare, *(f"model.{module}" for module in bare), *last_parts(kept)})


_PER_WORD = 8
_SECOND_STAGE = "_2"


class QuarkLayout(Layout):
    """Zero points are all zero. Of two stages `weight_scale` [] is the first one's."""

    name: LayoutName = "quark"
    cache_problem = None

    @override
    def check_shape(self, weight: TensorInfo, weights: WeightFormat) -> None:
        rows = weight.shape[0]
        if weights.number.is_integer and rows % _PER_WORD:
            raise LayoutError(
                weight.name,
                f"layout quark packs zero points of 8 rows into a word, got {rows} rows",
                fix="keep this tensor, or use layout compressed-tensors",
            )
        super().check_shape(weight, weights)

    @override
    def rows(self, block: "QuantizedWeight", weights: WeightFormat) -> Encoded:
        from ..numerics.quantized_weight import packed

        scale = f"weight_scale{_SECOND_STAGE}" if weights.first_stage else "weight_scale"
        if weights.number.is_integer and weights.granularity == "group":
            words = packed(weights.dtype, block.codes.T, interleaved=True, offset=0)
            return {"weight": Columns(words), scale: Columns(block.scale.T)}
        rows = {"weight": packed(weights.dtype, block.codes, interleaved=True, offset=0)}
        if weights.granularity == "group":
            rows[scale] = stored_scale(block.scale, weights)
        elif weights.granularity == "channel":
            rows[scale] = block.scale[:, 0]
        return rows

    @override
    def whole(
        self, weight: TensorInfo, block: "QuantizedWeight", recipe: Recipe, scale: float | None
    ) -> "dict[str, Tensor]":
        import torch

        whole = super().whole(weight, block, recipe, scale)
        if block.global_scale is not None:
            whole["weight_scale"] = scalar(block.global_scale, ())
        for suffix, (_, shape) in self.parts(weight, recipe).items():
            if suffix.startswith("weight_zero_point"):
                whole[suffix] = torch.zeros(shape, dtype=torch.int32)
        return whole


ZERO_POINT = 8
_ZERO_POINTS = -0x77777778  # 0x88888888 as int32: eight times the zero point 8


class AwqLayout(Layout):
    """INT4 groups."""

    name: LayoutName = "awq"
    int4_scale_dtype: Literal["float16"] | None = "float16"

    @override
    def check_shape(self, weight: TensorInfo, weights: WeightFormat) -> None:
        check_divides(self.name, weight, 0, 8)
        super().check_shape(weight, weights)

    @override
    def rows(self, block: "QuantizedWeight", weights: WeightFormat) -> Encoded:
        from ..numerics.quantized_weight import int4_words

        words = int4_words(block.codes.T, interleaved=True, offset=ZERO_POINT)
        return {"qweight": Columns(words), "scales": Columns(block.scale.T)}

    @override
    def whole(
        self, weight: TensorInfo, block: "QuantizedWeight", recipe: Recipe, scale: float | None
    ) -> "dict[str, Tensor]":
        import torch

        _, shape = self.parts(weight, recipe)["qzeros"]
        return {"qzeros": torch.full(shape, _ZERO_POINTS, dtype=torch.int32)}

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # Engines look for these parts anywhere in a module's name
        return last_parts(kept)
