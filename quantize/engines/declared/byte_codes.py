"""SGLang's own names for a byte per code: w8a8_fp8, w8a8_int8 and blockwise_int8.

Source: `w8a8_fp8.py`, `w8a8_int8.py` and `blockwise_int8.py` of SGLang 0.5.23, which read no groups
of linears, and of these keys none but the blocks.
"""

from collections.abc import Mapping
from typing import Any

from ...stored.layouts.scheme import EVERY_LINEAR, FP8_DTYPE, Part, Parts
from ..linear_scheme import ANY_FLOAT, Group, block_of, linear_scheme, scales_of_blocks


def fp8_rows(_declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """A scale for each row."""
    return _by_rows("w8a8_fp8", "fp8", FP8_DTYPE, "token-dynamic")


def int8_rows(_declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """A scale for each row."""
    return _by_rows("w8a8_int8", "int8@", "I8", "int8-token-dynamic")


def int8_blocks(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """A scale for each block."""
    block = block_of("weight_block_size", declared.get("weight_block_size"))

    def parts(rows: int, columns: int) -> Parts:
        scales = Part(ANY_FLOAT, scales_of_blocks(rows, columns, block))
        return {"weight": Part(("I8",), (rows, columns)), "weight_scale_inv": scales}

    names = ("blockwise_int8", "int8@", "block", None, "int8-group-dynamic", "weight")
    return (Group(EVERY_LINEAR, linear_scheme(*names, parts, block=block)),)


def _by_rows(method: str, dtype: str, stored: str, activations: str) -> tuple[Group, ...]:
    def parts(rows: int, columns: int) -> Parts:
        scales = Part(ANY_FLOAT, (rows, 1))
        return {"weight": Part((stored,), (rows, columns)), "weight_scale": scales}

    scheme = linear_scheme(method, dtype, "channel", None, activations, "weight", parts)
    return (Group(EVERY_LINEAR, scheme),)
