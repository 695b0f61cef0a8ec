"""Number formats in which weights are found: those of recipes, and integers of other tools."""

from collections.abc import Mapping
from typing import Literal

from typing_extensions import TypeIs

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


_OF_OTHER_TOOLS: Mapping[StoredDtype, NumberFormat] = {
    "int2": _integer(2),
    "int3": _integer(3),
    "int8": _integer(8),
}
INTEGERS: Mapping[int, StoredDtype] = {
    **{number.bits: dtype for dtype, number in _OF_OTHER_TOOLS.items()},
    **{number.bits: dtype for dtype, number in NUMBER_FORMATS.items() if number.is_integer},
}
"""By bits."""


def is_of_recipes(dtype: StoredDtype) -> TypeIs[WeightDtype]:
    """True if recipes have it."""
    return dtype in NUMBER_FORMATS


def number_format(dtype: StoredDtype) -> NumberFormat:
    """The facts of one."""
    return NUMBER_FORMATS[dtype] if is_of_recipes(dtype) else _OF_OTHER_TOOLS[dtype]
