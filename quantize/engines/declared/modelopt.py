"""ModelOpt: algorithms by name that engines have and this package does not decode.

Source: `modelopt.py` of vLLM 0.33.0.
"""

from collections.abc import Mapping
from typing import Any

from ...stored.layouts.scheme import FP8_DTYPE, Part, Parts
from ..linear_scheme import EVERY_LINEAR, Group
from .reading import linear_scheme, not_read


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear."""
    algorithm = str(declared.get("quant_algo")).upper()
    if algorithm == "MIXED_PRECISION":
        return (Group(EVERY_LINEAR, linear_scheme("modelopt", "mixed", "", None, "", "", _none)),)
    if algorithm not in _FORMS:
        not_read("quant_algo", declared.get("quant_algo"))
    dtype, granularity, activations, parts = _FORMS[algorithm]
    scheme = linear_scheme("modelopt", dtype, granularity, None, activations, "weight", parts)
    return (Group(EVERY_LINEAR, scheme),)


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


def _none(_rows: int, _columns: int) -> Parts:
    """Which of its layers have which scheme is known to no table."""
    return {}


_FORMS = {
    "FP8_PB_WO": ("fp8", "block", "none", _blocks),
    "MXFP8": ("mxfp8", "", "mxfp8", _powers),
}
