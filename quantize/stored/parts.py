"""How a declared layout stores one quantized linear: which tensors, of which dtypes and shapes.

It knows names and shapes, not bytes; shares no code with the writing side.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ..files.safetensors_header import TensorInfo
from .declarations import DeclaredScheme

FLOAT_DTYPES = ("BF16", "F16", "F32")
FP8_DTYPE = "F8_E4M3"
NIBBLES_PER_WORD = 8
COMPANIONS = (
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_zero_point_2",
    "input_scale",
    "weight_scale_2", "weight_scale_inv", "weight_global_scale", "input_global_scale",
    "qweight", "qzeros", "scales",
)  # fmt: skip
"""Suffixes that only a quantized linear has."""
ZERO_POINTS = {"weight_zero_point": 0x00, "weight_zero_point_2": 0x00, "qzeros": 0x88}
"""Every byte of the zero points of symmetric codes; AWQ's are two nibbles of 8."""
INPUT_SCALES = ("input_scale", "input_global_scale")
"""Static scales of a linear's input; the second one, of NVFP4 in compressed-tensors, divides."""
BESIDE_CODES = frozenset({*INPUT_SCALES, *ZERO_POINTS, "weight_shape"})
"""What symmetric codes are decoded without."""
_PACKED_DTYPES = (FP8_DTYPE, "I32", "U8")


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
        source_dtypes: which dtype an INT4 scale may have beside F16: that of the weight before
            quantization.
    """
    shape = (out_features, in_features)
    parts = _codes(scheme, *shape) | _scales(
        scheme, *shape, tuple(dict.fromkeys((*source_dtypes, "F16")))
    )
    one = (1,) if scheme.layout == "compressed-tensors" else ()
    if scheme.activations == "tensor-static":
        floats = ("F32",) if scheme.layout == "modelopt" else ("F32", "BF16")
        parts["input_scale"] = Part(floats, one)
    elif scheme.activations == "nvfp4":
        global_scale = scheme.layout == "compressed-tensors"
        parts["input_global_scale" if global_scale else "input_scale"] = Part(("F32",), one)
    return parts


def _codes(scheme: DeclaredScheme, rows: int, columns: int) -> dict[str, Part]:
    words = -(-columns // NIBBLES_PER_WORD)
    row_words = -(-rows // NIBBLES_PER_WORD)
    groups = columns // (scheme.group_size or columns)
    if scheme.weight_dtype == "fp8_e4m3":
        return {"weight": Part((FP8_DTYPE,), (rows, columns))}
    if scheme.weight_dtype in ("nvfp4", "mxfp4"):
        return {weight_suffix(scheme): Part(("U8",), (rows, columns // 2))}
    if scheme.layout == "compressed-tensors":
        return {
            "weight_packed": Part(("I32",), (rows, words)),
            "weight_shape": Part(("I64",), (2,)),
        }
    zeros = "qzeros" if scheme.layout == "awq" else "weight_zero_point"
    zeros += "_2" if scheme.first_stage else ""
    if scheme.transposed:
        return {
            weight_suffix(scheme): Part(("I32",), (columns, row_words)),
            zeros: Part(("I32",), (groups, row_words)),
        }
    return {"weight": Part(("I32",), (rows, words)), zeros: Part(("I32",), (row_words,))}


def _scales(
    scheme: DeclaredScheme, rows: int, columns: int, int4_dtypes: tuple[str, ...]
) -> dict[str, Part]:
    size = scheme.group_size or columns
    groups = columns // size
    ours = scheme.layout == "compressed-tensors"
    suffix = scale_suffix(scheme)
    if scheme.layout == "awq":
        return {suffix: Part(("F16",), (groups, rows))}
    if scheme.first_stage:
        return {"weight_scale": Part(("F32", "BF16"), ()), suffix: Part(FLOAT_DTYPES, (rows,))}
    if scheme.weight_dtype == "int4":
        shape: tuple[int, ...] = (rows, groups) if ours else (rows,)
        return {suffix: Part(int4_dtypes, (groups, rows) if scheme.transposed else shape)}
    if scheme.weight_dtype == "nvfp4":
        whole = "weight_global_scale" if ours else "weight_scale_2"
        return {
            suffix: Part((FP8_DTYPE,), (rows, groups)),
            whole: Part(("F32",), (1,) if ours else ()),
        }
    if scheme.weight_dtype == "mxfp4":
        return {suffix: Part(("U8",), (rows, groups))}
    floats = ("F32", "BF16") if scheme.layout in ("quark", "compressed-tensors") else ("F32",)
    if scheme.granularity == "block":
        return {suffix: Part(floats, (-(-rows // size), -(-columns // size)))}
    if scheme.granularity == "tensor":
        return {suffix: Part(floats, (1,) if ours else ())}
    return {suffix: Part(floats, (rows, 1) if ours else (rows,))}


def weight_suffix(scheme: DeclaredScheme) -> str:
    """Last part of the name of the tensor with the codes of a quantized linear."""
    if scheme.layout == "awq":
        return "qweight"
    packed = scheme.layout == "compressed-tensors" and scheme.weight_dtype != "fp8_e4m3"
    return "weight_packed" if packed else "weight"


def scale_suffix(scheme: DeclaredScheme) -> str:
    """Last part of the name of the tensor with its scales."""
    if scheme.layout == "awq":
        return "scales"
    if scheme.first_stage:
        return "weight_scale_2"
    plain_blocks = scheme.layout == "fp8" and scheme.granularity == "block"
    return "weight_scale_inv" if plain_blocks else "weight_scale"


def quantized_looking(tensors: Iterable[TensorInfo]) -> set[str]:
    """Modules with a tensor, or a weight of a dtype, that only a quantized linear has."""
    modules = set()
    for tensor in tensors:
        module, _, suffix = tensor.name.rpartition(".")
        packed = suffix == "weight" and tensor.dtype in _PACKED_DTYPES
        if module and (packed or suffix in COMPANIONS):
            modules.add(module)
    return modules
