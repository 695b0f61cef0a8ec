"""How a declared layout stores one quantized linear: which tensors, of which dtypes and shapes.

It knows names and shapes, not bytes; shares no code with the writing side.
"""

from collections.abc import Iterable, Mapping

from ..files.safetensors_header import TensorInfo
from .layouts import READ_LAYOUTS, DeclaredScheme
from .layouts.scheme import FLOAT_DTYPES, FP8_DTYPE, Part, Parts

__all__ = [
    "COMPANIONS",
    "FLOAT_DTYPES",
    "FP8_DTYPE",
    "INPUT_SCALES",
    "INVERSE_INPUT_SCALE",
    "WORDS_OF_CODES",
    "ZERO_POINTS",
    "Part",
    "beside_codes",
    "quantized_looking",
    "scale_suffix",
    "stored_parts",
    "weight_suffix",
]

COMPANIONS: frozenset[str] = frozenset().union(*(each.companions for each in READ_LAYOUTS.values()))
"""Suffixes that only a quantized linear has."""
ZERO_POINTS: Mapping[str, int] = {
    suffix: byte for each in READ_LAYOUTS.values() for suffix, byte in each.zero_points.items()
}
"""Every byte of the zero points of symmetric codes; AWQ's are two nibbles of 8."""
INVERSE_INPUT_SCALE = "input_global_scale"
"""Of NVFP4 in compressed-tensors: it divides."""
INPUT_SCALES = ("input_scale", INVERSE_INPUT_SCALE)
"""Static scales of a linear's input: one of the two."""
_BESIDE_CODES = frozenset({*INPUT_SCALES, *ZERO_POINTS, "weight_shape"})
"""What symmetric codes are decoded without."""
WORDS_OF_CODES = (".qweight", ".qzeros")
"""Ends of names of codes, and of their zero points, in words of 32 bits: of AWQ and GPTQ."""
_PACKED_DTYPES = (FP8_DTYPE, "I32", "U8")


def stored_parts(
    scheme: DeclaredScheme,
    out_features: int,
    in_features: int,
    source_dtypes: tuple[str, ...] = FLOAT_DTYPES,
) -> Parts:
    """The tensors of a linear by suffix ("weight", "weight_scale", ...).

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        source_dtypes: which dtype an INT4 scale may have beside F16: that of the weight before
            quantization.
    """
    scale_dtypes = tuple(dict.fromkeys((*source_dtypes, "F16")))
    return scheme.layout.parts(scheme, out_features, in_features, scale_dtypes)


def beside_codes(scheme: DeclaredScheme) -> frozenset[str]:
    """What its codes are decoded without."""
    zeros = scheme.layout.zeros(scheme)
    return _BESIDE_CODES - ({zeros.suffix} if zeros else set())


def weight_suffix(scheme: DeclaredScheme) -> str:
    """Last part of the name of the tensor with the codes of a quantized linear."""
    return scheme.layout.weight_suffix(scheme)


def scale_suffix(scheme: DeclaredScheme) -> str:
    """Last part of the name of the tensor with its scales."""
    return scheme.layout.scale_suffix(scheme)


def quantized_looking(tensors: Iterable[TensorInfo]) -> set[str]:
    """Modules with a tensor, or a weight of a dtype, that only a quantized linear has."""
    modules = set()
    for tensor in tensors:
        module, _, suffix = tensor.name.rpartition(".")
        packed = suffix == "weight" and tensor.dtype in _PACKED_DTYPES
        if module and (packed or suffix in COMPANIONS):
            modules.add(module)
    return modules
