"""ModelOpt: algorithms by name that engines have and this package does not decode.

Source: `modelopt.py` of vLLM 0.33.0.
"""

from collections.abc import Mapping
from typing import Any

from ...stored.layouts.scheme import EVERY_LINEAR, FP8_DTYPE, Part, Parts
from ..linear_scheme import Group, LinearScheme, linear_scheme, not_read


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear; of MIXED_PRECISION, one per algorithm, for layers by name on disk."""
    algorithm = str(declared.get("quant_algo")).upper()
    if algorithm != "MIXED_PRECISION":
        return (Group(EVERY_LINEAR, _scheme(algorithm)),)
    layers = declared.get("quantized_layers")
    if not isinstance(layers, Mapping):
        not_read("quantized_layers", layers)
    names: dict[str, list[str]] = {}
    for name, said in layers.items():
        algorithm = str(said.get("quant_algo") if isinstance(said, Mapping) else said).upper()
        names.setdefault(algorithm, []).append(name)
    return tuple(Group(tuple(found), _scheme(each)) for each, found in names.items())


def _scheme(algorithm: str) -> LinearScheme:
    if algorithm not in _FORMS:
        not_read("quant_algo", algorithm)
    dtype, granularity, activations, parts = _FORMS[algorithm]
    return linear_scheme("modelopt", dtype, granularity, None, activations, "weight", parts)


def _blocks(rows: int, columns: int) -> Parts:
    scales = (-(-rows // 128), 1, -(-columns // 128), 1)
    return {
        "weight": Part((FP8_DTYPE,), (rows, columns)),
        "weight_scale": Part(("F32",), scales),
    }


def _powers(rows: int, columns: int) -> Parts:
    return {
        "weight": Part((FP8_DTYPE,), (rows, columns)),
        "weight_scale": Part(("U8",), (rows, columns // 32)),
    }


def _static(rows: int, columns: int) -> Parts:
    one = Part(("F32",), ())
    return {
        "weight": Part((FP8_DTYPE,), (rows, columns)),
        "weight_scale": one,
        "input_scale": one,
    }


def _nvfp4(rows: int, columns: int) -> Parts:
    one = Part(("F32",), ())
    return {
        "weight": Part(("U8",), (rows, columns // 2)),
        "weight_scale": Part((FP8_DTYPE,), (rows, columns // 16)),
        "weight_scale_2": one,
        "input_scale": one,
    }


_FORMS = {
    "FP8": ("fp8", "tensor", "tensor-static", _static),
    "NVFP4": ("nvfp4", "", "nvfp4", _nvfp4),
    "FP8_PB_WO": ("fp8", "block", "none", _blocks),
    "MXFP8": ("mxfp8", "", "mxfp8", _powers),
}
