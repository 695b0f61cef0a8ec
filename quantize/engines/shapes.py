"""Shapes and dtypes of stored tensors against those of the parameters that they are to fill."""

from collections.abc import Sequence

from ..files.safetensors_header import TensorInfo
from ..stored.parts import FP8_DTYPE
from .contract import Finding

_FNUZ = "F8_E4M3FNUZ"


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without trailing ones: engines load a column of scales as [out] or [out, 1]."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def never_fits(stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """An engine may cut a part out of a larger tensor, and stretch a single number."""
    stored, expected = without_ones(stored), without_ones(expected)
    return len(stored) != len(expected) or any(
        there < wanted for there, wanted in zip(stored, expected, strict=True)
    )


def refused_shape(tensor: TensorInfo, shape: tuple[int, ...], remedy: str) -> Finding:
    """The assertion with which loaders refuse a tensor of another shape than its parameter."""
    text = f"AssertionError: {tensor.name} is {list(tensor.shape)}, its parameter {list(shape)}"
    return Finding("load", text, remedy)


def other_shape(tensor: TensorInfo, shape: tuple[int, ...]) -> Finding:
    """A tensor of which it is not known what a loader makes of its shape."""
    text = f"{tensor.name}: {tensor.dtype} {list(tensor.shape)}, expected shape {list(shape)}"
    return Finding("unknown", text, "the tensors are not those of the declaration or of the config")


def holds(tensor: TensorInfo, dtypes: Sequence[str]) -> bool:
    """Codes of the FNUZ kind are FP8 as well: engines copy them by value (executed)."""
    return tensor.dtype in dtypes or (FP8_DTYPE in dtypes and tensor.dtype == _FNUZ)
