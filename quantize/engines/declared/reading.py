"""What the readers share: an error, and how a format is spelled in signatures."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ...stored.layouts.scheme import Parts
from ..linear_scheme import LinearScheme

_ONE_GRANULARITY = ("nvfp4", "mxfp4", "mxfp8")


class NotReadError(Exception):
    """A declaration says something of which it is not known what engines make of it."""


def not_read(key: str, value: object) -> NoReturn:
    """Give up at a key."""
    raise NotReadError(f"{key} {value!r}")


def mapping(key: str, value: object) -> Mapping[str, Any]:
    """A section of a declaration, of any JSON type, as an object."""
    return value if isinstance(value, Mapping) else not_read(key, value)


def linear_scheme(
    layout: str,
    dtype: str,
    granularity: str,
    group_size: int | None,
    activations: str,
    suffix: str,
    parts: Callable[[int, int], Parts],
    *,
    not_read: tuple[str, ...] = ("weight_shape",),
) -> LinearScheme:
    """A scheme under the signature "layout dtype granularity activations".

    Args:
        layout: the quant_method of the declaration.
        dtype: of the codes; "+" after it: with zero points, "=": of AWQ, without, "@": a whole
            byte for each code; "awq-int4": packed as AWQ does.
        granularity: "" of formats that have one only.
        group_size: None where there are no groups.
        activations: as in signatures.
        suffix: of the tensor with the codes.
        parts: see `LinearScheme`.
        not_read: see `LinearScheme`.
    """
    own = dtype not in _ONE_GRANULARITY
    names = [layout, dtype, *([f"{granularity}{group_size or ''}"] if own else []), activations]
    return LinearScheme(
        layout=layout,
        signature=" ".join(name for name in names if name),
        weight_dtype={"fp8": "fp8_e4m3"}.get(dtype, dtype.rstrip("+@=")),
        granularity=granularity if own else "group",
        group_size=group_size,
        suffix=suffix,
        parts=parts,
        not_read=not_read,
    )


def count(columns: int, size: int | None) -> int:
    """Groups in so many columns; engines cut a last part of a group off."""
    return columns // (size or columns)


def words(number: int, bits: int) -> int:
    """Words of 32 bits for so many codes."""
    return -(-number * bits // 32)
