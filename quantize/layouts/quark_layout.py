"""AMD Quark's layout, as Quark 0.13 exports it (real_quantized, `reorder` packing), and AutoAWQ's.

AutoAWQ (`gemm`): INT4 groups, transposed, with float16 scales. The format has zero points;
symmetric codes are stored with the constant zero point 8. Sources: vLLM 0.33 `awq.py`, SGLang
0.5.23 `awq.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from ...recipes.errors import LayoutError
from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import TensorInfo
from .layout import (
    Columns,
    Encoded,
    Layout,
    Parts,
    check_divides,
    codes_part,
    last_parts,
    scalar,
    scale_dtype,
    stored_scale,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight

_PER_WORD = 8
_SECOND_STAGE = "_2"


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
        held = "int4", "fp8_e4m3", "mxfp4"
        if weights.dtype not in held or weights.granularity == "block":
            return "Quark 0.13 does not have these weights"
        if activations is not None and activations.dtype not in ("fp8_e4m3", weights.dtype):
            return "Quark 0.13 pairs MXFP4 activations with MXFP4 weights only"
        if activations and activations.dtype == "fp8_e4m3" and activations.granularity == "group":
            return "Quark 0.13 has no FP8 activations in groups"
        return None

    @override
    def parts(self, weight: TensorInfo, recipe: Recipe) -> Parts:
        weights, (rows, columns) = recipe.weights, weight.shape
        size, integers, words = weights.group_size, weights.number.is_integer, rows // _PER_WORD
        if integers and rows % _PER_WORD:
            raise LayoutError(
                weight.name,
                f"layout quark packs zero points of 8 rows into a word, got {rows} rows",
                fix="keep this tensor, or use layout compressed-tensors",
            )
        shape: tuple[int, ...] = (rows,) if weights.granularity == "channel" else ()
        if size is not None:
            check_divides(self.name, weight, 1, size)
            shape = (rows, columns // size)
        scales = scale_dtype(weight, weights)
        parts: Parts = {"weight": codes_part(weight, weights), "weight_scale": (scales, shape)}
        if weights.first_stage:
            parts["weight_scale"] = "F32", ()
            parts[f"weight_scale{_SECOND_STAGE}"] = "F32", (rows,)
            parts[f"weight_zero_point{_SECOND_STAGE}"] = "I32", (words,)
        elif integers and size is not None:
            parts["weight"] = "I32", (columns, words)
            parts["weight_scale"] = scales, shape[::-1]
            parts["weight_zero_point"] = "I32", (columns // size, words)
        elif integers:
            parts["weight_zero_point"] = "I32", (words,)
        if recipe.needs_input_scales:
            parts["input_scale"] = "F32", ()
        return parts

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
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]."""

    name: LayoutName = "awq"
    int4_scale_dtype: Literal["float16"] | None = "float16"

    @override
    def problem(self, recipe: Recipe) -> str | None:
        weights = recipe.weights
        if (weights.dtype, weights.granularity) != ("int4", "group"):
            return "AWQ stores INT4 groups only"
        if recipe.activations is not None:
            return "AWQ rounds weights only"
        if weights.scale_dtype != "float16":
            return "AWQ stores float16 scales: needs scale_dtype float16"
        return None

    @override
    def parts(self, weight: TensorInfo, recipe: Recipe) -> Parts:
        size = recipe.weights.group_size or 0
        check_divides(self.name, weight, 0, 8)
        check_divides(self.name, weight, 1, size)
        rows, columns = weight.shape
        return {
            "qweight": ("I32", (columns, rows // 8)),
            "qzeros": ("I32", (columns // size, rows // 8)),
            "scales": ("F16", (columns // size, rows)),
        }

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
