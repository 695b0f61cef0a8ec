"""Plain fp8 as DeepSeek and its kin publish it: scales in powers of two, scales for the cache.

Source: `Fp8Config.from_config` of vLLM 0.33.0 and SGLang 0.5.23. `scale_fmt` says which values
scales have, or get; their dtype and shape are the same.
"""

from collections.abc import Mapping
from typing import Any

from ...stored.layouts.scheme import EVERY_LINEAR, FLOAT_DTYPES, FP8_DTYPE, Part, Parts
from ..linear_scheme import Group, linear_scheme, not_read

_READ = frozenset(
    {
        "quant_method",
        "activation_scheme",
        "weight_block_size",
        "fmt",
        "scale_fmt",
        "kv_cache_scheme",
        "ignored_layers",
        "modules_to_not_convert",
    }
)


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear, in blocks or whole."""
    others = sorted(declared.keys() - _READ)
    said = (declared.get("fmt", "e4m3"), declared.get("scale_fmt", "ue8m0"))
    blocks, scheme = declared.get("weight_block_size"), declared.get("activation_scheme")
    if others or said != ("e4m3", "ue8m0") or scheme not in ("dynamic", "static"):
        not_read("fmt, scale_fmt", (*said, *others))
    if blocks is not None and (blocks != [128, 128] or scheme != "dynamic"):
        not_read("weight_block_size", blocks)
    static = scheme == "static"

    def parts(rows: int, columns: int) -> Parts:
        weight = {"weight": Part((FP8_DTYPE,), (rows, columns))}
        if blocks is not None:
            scales = (-(-rows // 128), -(-columns // 128))
            return {**weight, "weight_scale_inv": Part(FLOAT_DTYPES, scales)}
        inputs = {"input_scale": Part(FLOAT_DTYPES, ())} if static else {}
        return {**weight, "weight_scale": Part(FLOAT_DTYPES, ()), **inputs}

    how, activations = ("block", "group-dynamic") if blocks is not None else ("tensor", "")
    activations = activations or ("tensor-static" if static else "token-dynamic")
    return (
        Group(EVERY_LINEAR, linear_scheme("fp8", "fp8", how, None, activations, "weight", parts)),
    )
