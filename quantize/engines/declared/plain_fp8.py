"""Plain fp8 as DeepSeek and its kin publish it: blocks of any size, scales for the cache.

Source: `Fp8Config.from_config` of vLLM 0.33.0 and SGLang 0.5.23, which read no other keys than
these. `scale_fmt` says which values scales have, or get; their shape is the same.
"""

from collections.abc import Mapping
from typing import Any

from ...stored.layouts.scheme import EVERY_LINEAR, FP8_DTYPE, Part, Parts
from ..linear_scheme import (
    ANY_FLOAT,
    BLOCK,
    Group,
    block_of,
    linear_scheme,
    not_read,
    scales_of_blocks,
)


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear, in blocks or whole."""
    blocks, scheme = declared.get("weight_block_size"), declared.get("activation_scheme")
    if scheme not in ("dynamic", "static"):
        not_read("activation_scheme", scheme)
    if blocks is not None and scheme != "dynamic":
        not_read("weight_block_size", blocks)
    static = scheme == "static"
    block = BLOCK if blocks is None else block_of("weight_block_size", blocks)

    def parts(rows: int, columns: int) -> Parts:
        weight = {"weight": Part((FP8_DTYPE,), (rows, columns))}
        if blocks is not None:
            scales = Part(ANY_FLOAT, scales_of_blocks(rows, columns, block))
            return {**weight, "weight_scale_inv": scales}
        inputs = {"input_scale": Part(ANY_FLOAT, ())} if static else {}
        return {**weight, "weight_scale": Part(ANY_FLOAT, ()), **inputs}

    how, activations = ("block", "group-dynamic") if blocks is not None else ("tensor", "")
    activations = activations or ("tensor-static" if static else "token-dynamic")
    found = linear_scheme("fp8", "fp8", how, None, activations, "weight", parts, block=block)
    return (Group(EVERY_LINEAR, found),)
