"""Quark: UINT4 with zero points, INT8, NVFP4, groups of any size, linears of their own by name.

Source: `quark.py` of vLLM 0.33.0 and SGLang 0.5.23, and what Quark 0.13 exports.
"""

import re
from collections.abc import Mapping
from typing import Any

from ...stored.layouts.scheme import EVERY_LINEAR, FLOAT_DTYPES, FP8_DTYPE, Part, Parts
from ..linear_scheme import Group, LinearScheme, count, linear_scheme, mapping, not_read, words

Spec = Mapping[str, Any]
_ONE: tuple[int, ...] = ()


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear, and before it one for each pattern of `layer_quant_config`."""
    if declared.get("layer_type_quant_config"):
        not_read("layer_type_quant_config", declared["layer_type_quant_config"])
    layers = mapping("layer_quant_config", declared.get("layer_quant_config") or {})
    own = (Group((_expression(name),), _section(name, said)) for name, said in layers.items())
    every = _section("global_quant_config", declared.get("global_quant_config"))
    return (*own, Group(EVERY_LINEAR, every))


def quantizes_outputs(declared: Mapping[str, Any]) -> bool:
    """Whether outputs or biases are to be quantized, but those of the KV cache."""
    export, layers = declared.get("export"), declared.get("layer_quant_config")
    cache = export.get("kv_cache_group") if isinstance(export, Mapping) else None
    cache = cache if isinstance(cache, list) else []
    named = layers.items() if isinstance(layers, Mapping) else ()
    sections = [said for name, said in named if name not in cache]
    sections.append(declared.get("global_quant_config"))
    return any(
        isinstance(said, Mapping) and (said.get("output_tensors") or said.get("bias"))
        for said in sections
    )


def _expression(pattern: str) -> str:
    """A shell wildcard for a whole name as a regular expression."""
    return "re:" + ".*".join(map(re.escape, pattern.split("*"))) + "$"


def _section(key: str, said: object) -> LinearScheme:
    section = mapping(key, said)
    return _scheme(section.get("weight"), section.get("input_tensors"))


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
    if dtype == "fp4" and how == "group" and size == 32:
        activations = _activations(inputs)
        return linear_scheme("quark", f"mx{dtype}", "", size, activations, "weight", _mxfp4)
    if dtype != "fp8_e4m3" or how not in ("tensor", "channel"):
        not_read("weight", dict(weight))
    return _fp8(how, _activations(inputs))


def _activations(inputs: Any) -> str:
    """As in signatures."""
    if inputs is None:
        return "none"
    said = mapping("input_tensors", inputs)
    if said.get("dtype") == "fp4" and said.get("group_size") == 32:
        return f"mx{said['dtype']}"
    if said.get("dtype") != "fp8_e4m3":
        not_read("input_tensors", dict(said))
    if said.get("qscheme") == "per_channel":
        return "token-dynamic" if said.get("is_dynamic") else not_read("input_tensors", dict(said))
    return "tensor-dynamic" if said.get("is_dynamic") else "tensor-static"


def _fp8(how: str, activations: str) -> LinearScheme:
    def parts(rows: int, columns: int) -> Parts:
        found = {
            "weight": Part((FP8_DTYPE,), (rows, columns)),
            "weight_scale": Part(FLOAT_DTYPES, _ONE if how == "tensor" else (rows,)),
        }
        static = {"input_scale": Part(FLOAT_DTYPES, _ONE)}
        return found | (static if activations == "tensor-static" else {})

    return linear_scheme("quark", "fp8", how, None, activations, "weight", parts)


def _mxfp4(rows: int, columns: int) -> Parts:
    return {
        "weight": Part(("U8",), (rows, columns // 2)),
        "weight_scale": Part(("U8",), (rows, columns // 32)),
    }


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
