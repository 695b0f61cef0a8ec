"""Layouts: how quantized weights are named, packed and declared on disk."""

from ...recipes.schema import LayoutName
from .base import Layout, StoredTensor
from .compressed_tensors import CompressedTensorsLayout
from .modelopt import ModelOptLayout
from .quark import QuarkLayout

_LAYOUTS: dict[LayoutName, Layout] = {
    "quark": QuarkLayout(),
    "modelopt": ModelOptLayout(),
    "compressed-tensors": CompressedTensorsLayout(),
}


def get_layout(name: LayoutName) -> Layout:
    """The layout of a recipe."""
    return _LAYOUTS[name]


__all__ = ["Layout", "StoredTensor", "get_layout"]
