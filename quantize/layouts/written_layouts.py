"""How each layout that is written names, packs and excludes.

Quark as Quark 0.13 exports it (real_quantized, `reorder` packing); compressed-tensors 0.20;
ModelOpt 0.47. Plain `fp8` has one scale per matrix, or per 128 x 128 block as DeepSeek-V3 is
published; AutoAWQ (`gemm`) INT4 groups, transposed, with float16 scales and the constant zero point
8. Sources: `fp8.py` and `awq.py` of vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Sequence
from typing import Literal

from typing_extensions import override

from ...recipes.errors import LayoutError
from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.stored_modelopt import algorithm_of
from .layout import Layout, check_divides, last_parts


class CompressedTensorsLayout(Layout):
    """Scales of a whole matrix are [1]; those over others, and of NVFP4's inputs, divide."""

    name: LayoutName = "compressed-tensors"
    mix_problem: str | None = None
    cache_problem = None
    cache_scale_shape = (1,)
    nibble_offset = 8

    @override
    def check_shape(self, weight: TensorInfo, weights: WeightFormat) -> None:
        if weights.group_size:
            check_divides(self.name, weight, 1, weights.group_size)


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
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # vLLM compares whole names, so both spellings of each are listed; SGLang looks for parts
        bare = [module.removeprefix("model.") for module in kept]
        return sorted({*bare, *(f"model.{module}" for module in bare), *last_parts(kept)})


_PER_WORD = 8


class QuarkLayout(Layout):
    """Zero points are all zero. Of two stages `weight_scale` [] is the first one's."""

    name: LayoutName = "quark"
    cache_problem = None
    interleaved = True

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


class AwqLayout(Layout):
    """INT4 groups."""

    name: LayoutName = "awq"
    int4_scale_dtype: Literal["float16"] | None = "float16"
    interleaved = True
    nibble_offset = 8
    zero_points = -0x77777778  # 0x88888888 as int32: eight times 8

    @override
    def check_shape(self, weight: TensorInfo, weights: WeightFormat) -> None:
        check_divides(self.name, weight, 0, 8)
        super().check_shape(weight, weights)

    @override
    def excludes(self, kept: Sequence[str]) -> list[str]:
        # Engines look for these parts anywhere in a module's name
        return last_parts(kept)
