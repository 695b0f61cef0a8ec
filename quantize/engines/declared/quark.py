"""Quark: UINT4 with zero points, INT8, NVFP4, groups of any size.

Source: `quark.py` of vLLM 0.33.0 and SGLang 0.5.23, and what Quark 0.13 exports.
"""

from collections.abc import Mapping
from typing import Any

from ...stored.layouts.scheme import EVERY_LINEAR, FLOAT_DTYPES, FP8_DTYPE, Part, Parts
from ..linear_scheme import Group, LinearScheme, count, linear_scheme, mapping, not_read, words

Spec = Mapping[str, Any]
_ONE: tuple[int, ...] = ()


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear."""
    for key in ("layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config"):
        if declared.get(key):
            not_read(key, declared[key])
    section = declared.get("global_quant_config")
    if not isinstance(section, Mapping) or section.get("output_tensors") or section.get("bias"):
        not_read("global_quant_config", section)
    return (Group(EVERY_LINEAR, _scheme(section.get("weight"), section.get("input_tensors"))),)


def _scheme(weight: Any, inputs: Any) -> LinearScheme:
    if isinstance(weight, list):
        if not (_is_nvfp4(weight) and _is_nvfp4(inputs)):
            not_read("weight", weight)
        return linear_scheme("quark", "nvfp4", "", None, "nvfp4", "weight", _nvfp4)
    if not isinstance(weight, Mapping):
        not_read("weight", weight)
    dtype, size = weight.get("dtype"), weight.get("group_size")
    how = str(weight.get("qscheme")).removeprefix("per_")
    if dtype in ("int4", "uint4") and how == "group" and inputs is None and type(size) is int:

        def parts(rows: int, columns: int) -> Parts:
            return {
                "weight": Part(("I32",), (columns, words(rows, 4))),
                "weight_zero_point": Part(("I32",), (count(columns, size), words(rows, 4))),
                "weight_scale": Part(FLOAT_DTYPES, (count(columns, size), rows)),
            }

        unread = ("weight_zero_point",) if dtype == "int4" else ()
        return linear_scheme("quark", dtype, how, size, "none", "weight", parts, not_read=unread)
    static = (
        isinstance(inputs, Mapping)
        and inputs.get("dtype") == "int8"
        and not inputs.get("is_dynamic")
    )
    if dtype == "int8" and how == "tensor" and static:
        return linear_scheme("quark", dtype, how, None, "int8-tensor-static", "weight", _int8)
    return not_read("weight", dict(weight))


def _is_nvfp4(stages: Any) -> bool:
    """FP4 in groups of 16, whose scales are FP8 under one of the matrix."""
    if not isinstance(stages, list) or len(stages) != 2:
        return False
    first, second = (mapping("weight", stage) for stage in stages)
    sizes = (first.get("dtype"), first.get("group_size"), second.get("dtype"))
    return sizes == ("fp4", 16, "fp8_e4m3") and bool(second.get("is_scale_quant"))


def _nvfp4(rows: int, columns: int) -> Parts:
    return {
        "weight": Part(("U8",), (rows, columns // 2)),
        "weight_scale": Part((FP8_DTYPE,), (rows, columns // 16)),
        "weight_scale_2": Part(("F32",), _ONE),
        "input_scale_2": Part(("F32",), _ONE),
    }


def _int8(rows: int, columns: int) -> Parts:
    return {
        "weight": Part(("I8",), (rows, columns)),
        "weight_scale": Part(FLOAT_DTYPES, _ONE),
        "weight_zero_point": Part(("I8",), _ONE),
        "input_scale": Part(FLOAT_DTYPES, _ONE),
    }
