"""Declarations as engines read them: more than this package decodes, and less strictly.

One module per quant_method; each gives the groups of linears and how they are stored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..linear_scheme import Group
from . import autoawq, compressed_tensors, modelopt, quark

READERS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Group, ...]]] = {
    "awq": autoawq.groups,
    "compressed-tensors": compressed_tensors.groups,
    "modelopt": modelopt.groups,
    "quark": quark.groups,
}
"""quant_method -> reader of a declaration. Raises NotReadError."""
