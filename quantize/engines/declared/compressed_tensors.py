"""compressed-tensors: groups of any name, each with targets and a format of its own.

Source: `_quantization_scheme_map_from_config` and `_get_scheme_from_parts` of vLLM 0.33.0, and
their like in SGLang 0.5.23. Keys that neither reads (observer, scale_dtype of floats, version,
kv_cache_scheme of a draft without scales) say nothing here; transforms change nothing stored.
"""

from collections.abc import Mapping
from typing import Any

from ...stored.layouts.scheme import FP8_DTYPE, Part, Parts
from ..linear_scheme import (
    ANY_FLOAT,
    BLOCK,
    Group,
    LinearScheme,
    block_of,
    count,
    linear_scheme,
    mapping,
    not_read,
    scales_of_blocks,
    words,
)

Args = Mapping[str, Any]
_FLOAT, _ONE = ANY_FLOAT, (1,)
ORDERED = ("group", "dynamic")
"""Each actorder of which the inputs of a group stand anywhere in a row."""


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One per entry of config_groups, in order."""
    found = declared.get("config_groups")
    if not isinstance(found, Mapping) or not found:
        not_read("config_groups", found)
    usual = declared.get("format")
    return tuple(_group(mapping(name, group), usual) for name, group in found.items())


def _group(group: Args, usual_format: object) -> Group:
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        not_read("targets", targets)
    if group.get("output_activations") or not group.get("weights"):
        not_read("output_activations", group.get("output_activations"))
    form = group.get("format") or usual_format
    weights = mapping("weights", group["weights"])
    inputs = group.get("input_activations")
    inputs = mapping("input_activations", inputs) if inputs else None
    return Group(tuple(targets), _scheme(weights, inputs, form))


def _scheme(weights: Args, inputs: Args | None, form: object) -> LinearScheme:
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    strategy, activations = str(weights.get("strategy")), _activations(inputs)
    if weights.get("dynamic"):
        not_read("dynamic", weights["dynamic"])
    ordered = weights.get("actorder") in ORDERED
    symmetric = weights.get("symmetric", True)
    dtype = _dtype(weights)
    if kind == "int" and type(bits) is int and 2 <= bits <= 8:
        return _integers(
            dtype, bits, strategy, size, activations, form, symmetric=symmetric, ordered=ordered
        )
    if not symmetric or dtype not in ("fp8", "nvfp4", "mxfp4", "mxfp8"):
        not_read("weights", dict(weights))
    blocks = dtype == "fp8" and strategy == "block"
    block = block_of("block_structure", weights.get("block_structure")) if blocks else BLOCK

    def parts(rows: int, columns: int) -> Parts:
        return _float_parts(dtype, strategy, activations, rows, columns, block)

    suffix = "weight_packed" if dtype in ("nvfp4", "mxfp4") else "weight"
    group_size = None if dtype == "fp8" else size
    return linear_scheme(
        "compressed-tensors", dtype, strategy, group_size, activations, suffix, parts, block=block
    )


def _dtype(args: Args) -> str:
    bits, kind, strategy = args.get("num_bits"), args.get("type"), args.get("strategy")
    size = args.get("group_size")
    if kind == "int":
        return f"int{bits}"
    if bits == 4:
        return {"tensor_group 16": "nvfp4", "group 32": "mxfp4"}.get(f"{strategy} {size}", "fp4")
    powers = strategy == "group" and size == 32 and "uint8" in str(args.get("scale_dtype"))
    return "mxfp8" if powers else "fp8"


def _activations(inputs: Args | None) -> str:
    """As in signatures: "token-dynamic" is FP8, other formats are named."""
    if not inputs:
        return "none"
    dtype = _dtype(inputs)
    if dtype in ("nvfp4", "mxfp4", "mxfp8"):
        return dtype
    how = "dynamic" if inputs.get("dynamic") else "static"
    named = f"{inputs.get('strategy')}-{how}"
    return named if dtype == "fp8" else f"{dtype}-{named}"


def _integers(
    dtype: str,
    bits: int,
    strategy: str,
    size: Any,
    activations: str,
    form: object,
    *,
    symmetric: bool,
    ordered: bool,
) -> LinearScheme:
    """Packed into words, or a byte for each code."""
    if strategy not in ("group", "channel", "tensor"):
        not_read("strategy", strategy)
    if size is not None and (type(size) is not int or size < 1):
        not_read("group_size", size)
    if form not in ("pack-quantized", "int-quantized"):
        not_read("format", form)
    packed = form == "pack-quantized"

    def parts(rows: int, columns: int) -> Parts:
        scales = _ONE if strategy == "tensor" else (rows, count(columns, size))
        found: Parts = {"weight_scale": Part(_FLOAT, scales)}
        if packed:
            found["weight_packed"] = Part(("I32",), (rows, words(columns, bits)))
            found["weight_shape"] = Part(("I64",), (2,))
        else:
            found["weight"] = Part(("I8",), (rows, columns))
        if not symmetric:
            zeros = (words(rows, bits), scales[-1])
            found["weight_zero_point"] = Part(("I32",) if packed else ("I8",), zeros)
        if activations.endswith("static"):
            found["input_scale"] = Part(_FLOAT, _ONE)
        if ordered:
            found["weight_g_idx"] = Part(("I32",), (columns,))
        return found

    spelled = dtype + ("" if symmetric else "+") + ("" if packed else "@")
    suffix = "weight_packed" if packed else "weight"
    strategy = "ordered" if ordered else strategy
    return linear_scheme("compressed-tensors", spelled, strategy, size, activations, suffix, parts)


def _float_parts(
    dtype: str,
    strategy: str,
    activations: str,
    rows: int,
    columns: int,
    block: tuple[int, int],
) -> Parts:
    found: Parts = {}
    if dtype == "nvfp4":
        found["weight_packed"] = Part(("U8",), (rows, columns // 2))
        found["weight_scale"] = Part((FP8_DTYPE,), (rows, columns // 16))
        found["weight_global_scale"] = Part(("F32",), _ONE)
        if activations == "nvfp4":
            found["input_global_scale"] = Part(("F32",), _ONE)
    elif dtype == "mxfp4":
        found["weight_packed"] = Part(("U8",), (rows, columns // 2))
        found["weight_scale"] = Part(("U8",), (rows, columns // 32))
    elif dtype == "mxfp8":
        found["weight"] = Part((FP8_DTYPE,), (rows, columns))
        found["weight_scale"] = Part(("U8",), (rows, columns // 32))
    else:
        scales = {
            "tensor": _ONE,
            "channel": (rows, 1),
            "block": scales_of_blocks(rows, columns, block),
        }
        if strategy not in scales:
            not_read("strategy", strategy)
        found["weight"] = Part((FP8_DTYPE,), (rows, columns))
        found["weight_scale"] = Part(_FLOAT, scales[strategy])
        if activations == "tensor-static":
            found["input_scale"] = Part(_FLOAT, _ONE)
    return found
