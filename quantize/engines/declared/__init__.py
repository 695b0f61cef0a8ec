"""Declarations as engines read them: more kinds than draftquant decodes, and less strictly.

There is one module per quant_method. Each returns the groups of linears and how they are stored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..linear_scheme import Group
from . import autoawq, compressed_tensors, gptq, modelopt, plain_fp8, quark

READERS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Group, ...]]] = {
    "auto-round": gptq.auto_round_groups,
    "awq": autoawq.groups,
    "compressed-tensors": compressed_tensors.groups,
    "fp8": plain_fp8.groups,
    "gptq": gptq.groups,
    "modelopt": modelopt.groups,
    "quark": quark.groups,
}
"""quant_method -> reader of a declaration. Raises NotReadError."""
