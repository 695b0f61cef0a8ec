"""AutoAWQ's layout (`gemm`): INT4 groups, transposed, with float16 scales.

Sources: vLLM 0.33 `awq.py`, SGLang 0.5.23 `awq.py`. The format has zero points; symmetric codes
are stored with the constant zero point 8.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import StoredTensor, TensorInfo
from .layout import Columns, Layout, OwnFormat, check_divides, last_parts

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.quantized_weight import QuantizedWeight

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
    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        size = recipe.weights.group_size or 0
        check_divides(self.name, weight, 0, 8)
        check_divides(self.name, weight, 1, size)
        rows, columns = weight.shape
        module, groups = weight.name.removesuffix(".weight"), columns // size
        return (
            StoredTensor(name=f"{module}.qweight", dtype="I32", shape=(columns, rows // 8)),
            StoredTensor(name=f"{module}.qzeros", dtype="I32", shape=(groups, rows // 8)),
            StoredTensor(name=f"{module}.scales", dtype="F16", shape=(groups, rows)),
        )

    @override
    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor | Columns]":
        from ..numerics.quantized_weight import int4_words

        words = int4_words(block.codes.T, interleaved=True, offset=ZERO_POINT)
        return {f"{module}.qweight": Columns(words), f"{module}.scales": Columns(block.scale.T)}

    @override
    def encode_whole(
        self,
        weight: TensorInfo,
        block: "QuantizedWeight",
        recipe: Recipe,
        input_scale: float | None,
    ) -> "dict[str, Tensor]":
        import torch

        (_, zeros, _) = self.stored(weight, recipe)
        return {zeros.name: torch.full(zeros.shape, _ZERO_POINTS, dtype=torch.int32)}

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # Engines look for these parts anywhere in a module's name
        return last_parts(kept)

    @override
    def declare(
        self, recipe: Recipe, kept: Sequence[str], own: Sequence[OwnFormat] = ()
    ) -> dict[str, Any]:
        return {
            "bits": 4,
            "group_size": recipe.weights.group_size,
            "modules_to_not_convert": self.excludes(kept),
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }
