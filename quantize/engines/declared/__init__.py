"""Declarations as engines read them: more kinds than draftquant decodes, and less strictly.

There is one module per quant_method. Each returns the groups of linears and how they are stored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..linear_scheme import Group
from . import autoawq, byte_codes, compressed_tensors, gptq, modelopt, plain_fp8, quark

READERS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Group, ...]]] = {
    "auto-round": gptq.auto_round_groups,
    "awq": autoawq.groups,
    "blockwise_int8": byte_codes.int8_blocks,
    "compressed-tensors": compressed_tensors.groups,
    "fp8": plain_fp8.groups,
    "gptq": gptq.groups,
    "modelopt": modelopt.groups,
    "quark": quark.groups,
    "w8a8_fp8": byte_codes.fp8_rows,
    "w8a8_int8": byte_codes.int8_rows,
}
"""quant_method -> reader of a declaration. Raises NotReadError."""
