"""A layout: how codes and scales are named, packed and declared on disk.

A layout knows nothing of how scales were chosen, and nothing of files: it says which tensors a
quantized weight becomes, turns blocks of rows into them, and writes the `quantization_config`.
Planning needs layouts too, so they import torch only where they encode.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...recipes.schema import LayoutName, Recipe, WeightFormat
from ..errors import LayoutError
from ..safetensors_header import DTYPE_BYTES, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of the output: on-disk name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Layout(Protocol):
    """One way to store quantized weights."""

    name: LayoutName

    def check(self, recipe: Recipe) -> None:
        """Fail if this layout cannot express the recipe's formats.

        Raises:
            LayoutError: names the layouts that can.
        """

    def stored(self, weight: TensorInfo, recipe: Recipe) -> tuple[StoredTensor, ...]:
        """The tensors that a quantized weight [out, in] becomes.

        Raises:
            LayoutError: this shape cannot be stored.
        """

    def encode_rows(
        self, module: str, block: "QuantizedWeight", weights: WeightFormat
    ) -> "Mapping[str, Tensor]":
        """A block of rows -> the matching rows of each stored tensor that has rows, by name."""

    def encode_whole(
        self, weight: TensorInfo, scale: "Tensor", recipe: Recipe, input_scale: float | None
    ) -> "Mapping[str, Tensor]":
        """The stored tensors that a weight has once, by name.

        Args:
            weight: the source weight [out, in].
            scale: [1, 1] if the weight has one scale; unused where it has one per row.
            recipe: whose formats are stored.
            input_scale: static activation scale, None where activations are dynamic or not rounded.
        """

    def declare(self, recipe: Recipe, kept: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json; `kept` are the module names to exclude."""

    def side_files(self, declared: Mapping[str, Any]) -> Mapping[str, Any]:
        """Further JSON files of this layout by name."""


def excluded_spellings(kept: Sequence[str]) -> list[str]:
    """How vLLM 0.33 and SGLang 0.5.23 want an exclude spelled: exact names and an index-free regex.

    Engines match runtime names: vLLM asks for `model.fc`, the vendor's own loader for `fc`; layer
    numbers differ from those on disk, so the regex names the last part alone.
    """
    exact = [name for module in kept for name in (module, f"model.{module.removeprefix('model.')}")]
    leaves = sorted({module.rpartition(".")[2] for module in kept})
    return [*dict.fromkeys(exact), *(f"re:.*{leaf}$" for leaf in leaves)]


def stored_scalars(
    weight: TensorInfo,
    scale: "Tensor",
    recipe: Recipe,
    input_scale: float | None,
    shape: tuple[int, ...],
) -> dict[str, "Tensor"]:
    """The single weight scale and the input scale of a linear, where it has them, in `shape`."""
    import torch

    module = weight.name.removesuffix(".weight")
    found: dict[str, Tensor] = {}
    if recipe.weights.granularity == "tensor":
        found[f"{module}.weight_scale"] = scale.reshape(shape)
    if input_scale is not None:
        found[f"{module}.input_scale"] = torch.full(shape, input_scale, dtype=torch.float32)
    return found


def refuse(layout: LayoutName, what: str, *, able: Sequence[LayoutName]) -> LayoutError:
    """The error of a layout that cannot express a recipe."""
    return LayoutError(f"layout {layout}", what, fix=f"use one of: {', '.join(able)}")


def is_int4(weights: WeightFormat) -> bool:
    """True for INT4 codes, False for FP8 ones."""
    return weights.dtype == "int4"
