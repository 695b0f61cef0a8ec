"""How a declared layout stores one quantized linear: which tensors, of which dtypes and shapes.

It knows names and shapes, not bytes; shares no code with the writing side.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .declared import DeclaredScheme
from .safetensors_header import TensorInfo

FLOAT_DTYPES = ("BF16", "F16", "F32")
FP8_DTYPE = "F8_E4M3"
NIBBLES_PER_WORD = 8
COMPANIONS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "input_scale")
"""Suffixes that only a quantized linear has."""


class Part(NamedTuple):
    """One stored tensor of a quantized linear; any one of `dtypes` is right."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


def stored_parts(
    scheme: DeclaredScheme,
    out_features: int,
    in_features: int,
    source_dtypes: tuple[str, ...] = FLOAT_DTYPES,
) -> dict[str, Part]:
    """The tensors of a linear by suffix ("weight", "weight_scale", ...).

    Args:
        scheme: what the folder declares.
        out_features: rows of the weight.
        in_features: columns of the weight.
        source_dtypes: which dtype an INT4 scale may have: that of the weight before quantization.
    """
    quark, modelopt = scheme.layout == "quark", scheme.layout == "modelopt"
    per_row = scheme.granularity == "channel"
    words = -(-in_features // NIBBLES_PER_WORD)
    one = (1,) if scheme.layout == "compressed-tensors" else ()
    rows = (out_features,) if quark or modelopt else (out_features, 1)
    scale_dtypes = source_dtypes if scheme.weight_dtype == "int4" else ("F32", "BF16")
    if modelopt:
        scale_dtypes = ("F32",)
    parts = {"weight_scale": Part(scale_dtypes, rows if per_row else one)}
    if scheme.weight_dtype == "fp8_e4m3":
        parts["weight"] = Part((FP8_DTYPE,), (out_features, in_features))
    elif quark:
        parts["weight"] = Part(("I32",), (out_features, words))
        parts["weight_zero_point"] = Part(("I32",), (-(-out_features // NIBBLES_PER_WORD),))
    else:
        parts["weight_packed"] = Part(("I32",), (out_features, words))
        parts["weight_shape"] = Part(("I64",), (2,))
    if scheme.activations == "tensor-static":
        parts["input_scale"] = Part(("F32",) if modelopt else ("F32", "BF16"), one)
    return parts


def weight_name(scheme: DeclaredScheme, module: str) -> str:
    """Name of the tensor with the codes of a quantized linear."""
    packed = scheme.weight_dtype == "int4" and scheme.layout == "compressed-tensors"
    return f"{module}.weight_packed" if packed else f"{module}.weight"


def quantized_looking(tensors: Iterable[TensorInfo]) -> set[str]:
    """Modules with a tensor, or a weight of a dtype, that only a quantized linear has."""
    modules = set()
    for tensor in tensors:
        module, _, suffix = tensor.name.rpartition(".")
        packed = suffix == "weight" and tensor.dtype in (FP8_DTYPE, "I32")
        if module and (packed or suffix in COMPANIONS):
            modules.add(module)
    return modules
