"""Layouts: how quantized weights are named, packed and declared on disk."""

from ...recipes.schema import LayoutName, Recipe
from ..errors import LayoutError
from .awq import AwqLayout
from .base import Columns, Layout
from .compressed_tensors import CompressedTensorsLayout
from .fp8 import Fp8Layout
from .modelopt import ModelOptLayout
from .quark import QuarkLayout

_LAYOUTS: dict[LayoutName, Layout] = {
    "quark": QuarkLayout(),
    "modelopt": ModelOptLayout(),
    "compressed-tensors": CompressedTensorsLayout(),
    "fp8": Fp8Layout(),
    "awq": AwqLayout(),
}


def get_layout(name: LayoutName) -> Layout:
    """The layout of a recipe."""
    return _LAYOUTS[name]


def check_layout(recipe: Recipe) -> None:
    """Fail if the recipe's layout cannot express its formats.

    Raises:
        LayoutError: names the layouts that can.
    """
    stored = recipe.stored
    problem = get_layout(recipe.layout).problem(stored)
    if problem is not None:
        able = [name for name, other in _LAYOUTS.items() if other.problem(stored) is None]
        raise LayoutError(
            f"layout {recipe.layout}",
            f"{problem}: weights {recipe.weights}, activations {recipe.activations or 'none'}",
            fix=f"use one of: {', '.join(able)}" if able else "no layout has a name for these two",
        )


__all__ = ["Columns", "Layout", "check_layout", "get_layout"]
