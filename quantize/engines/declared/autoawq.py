"""AutoAWQ: 4 bits in groups of any size, with zero points or without; whatever its version is.

Source: `AutoAWQConfig.from_config` of vLLM 0.33.0 and `AWQConfig` of SGLang 0.5.23, which do not
read `version`: files of GEMV are loaded as those of GEMM are. Both take the keys of llm-awq.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ...stored.layouts.scheme import EVERY_LINEAR, FLOAT_DTYPES, Part, Parts
from ..linear_scheme import Group, count, linear_scheme, not_read, words


def groups(declared: Mapping[str, Any]) -> tuple[Group, ...]:
    """One for every linear."""
    bits = declared.get("w_bit", declared.get("bits"))
    size = declared.get("q_group_size", declared.get("group_size"))
    if bits != 4 or type(size) is not int:
        not_read("bits, group_size", (bits, size))
    dtype = "int4" if declared.get("zero_point") else "int4="
    how, own = ("group", size) if size > 0 else ("channel", None)
    scheme = linear_scheme("awq", dtype, how, own, "none", "qweight", awq_parts(size))
    return (Group(EVERY_LINEAR, scheme),)


def awq_parts(size: int) -> Callable[[int, int], Parts]:
    """Rows and columns -> codes and zero points in words along the outputs; -1: one group."""

    def parts(rows: int, columns: int) -> Parts:
        groups = count(columns, size if size > 0 else None)
        return {
            "qweight": Part(("I32",), (columns, words(rows, 4))),
            "qzeros": Part(("I32",), (groups, words(rows, 4))),
            "scales": Part(FLOAT_DTYPES, (groups, rows)),
        }

    return parts
