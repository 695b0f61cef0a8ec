"""Number formats in which weights are found: those of recipes, and integers of other tools."""

from collections.abc import Mapping
from typing import Literal

from ....recipes.formats import NUMBER_FORMATS, NumberFormat, WeightDtype

StoredDtype = Literal[WeightDtype, "int2", "int3", "int8"]


def _integer(bits: int) -> NumberFormat:
    """Two's complement, packed into words of 32 bits unless a layout says otherwise."""
    return NumberFormat(
        bits=bits,
        kind="int",
        largest=2 ** (bits - 1) - 1,
        sizes={},
        stored_dtype="I32",
        codes_per_element=32 // bits,
        scale_dtype=None,
    )


_OF_OTHER_TOOLS: Mapping[str, NumberFormat] = {f"int{bits}": _integer(bits) for bits in (2, 3, 8)}


def number_format(dtype: StoredDtype) -> NumberFormat:
    """The facts of one."""
    return _OF_OTHER_TOOLS[dtype] if dtype in _OF_OTHER_TOOLS else NUMBER_FORMATS[dtype]
