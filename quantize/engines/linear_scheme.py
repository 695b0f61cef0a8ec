"""How a declaration says that a linear is stored and computed, as an engine takes it.

`stored.layouts.DeclaredScheme` is what this package can decode. Engines take more than that: other
group sizes, zero points, INT8, MXFP8, several schemes in one draft. Here they are shapes only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ...recipes.formats import NUMBER_FORMATS
from ..stored.layouts import DeclaredScheme
from ..stored.layouts.scheme import FLOAT_DTYPES, GROUPS, Part, Parts
from ..stored.stored_declaration import stored_parts, weight_suffix

BLOCK = (128, 128)
ANY_FLOAT = (*FLOAT_DTYPES, "F8_E8M0")
_SYMMETRIC = ("weight_shape", "weight_zero_point", "weight_zero_point_2")
"""No kernel reads them: codes are symmetric."""
_ONE_GRANULARITY = (*GROUPS, "mxfp8")
_GLOBAL_SCALES = {name for name, number in NUMBER_FORMATS.items() if number.global_scale}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScheme:
    """One way to store a linear.

    Attributes:
        layout: the quant_method that stores it so.
        signature: key of the engines' tables, such as "quark int4 group128 none".
        weight_dtype: name of the number format; others than this package's too.
        group_size: None for channel and tensor.
        first_stage: codes were taken of values that were rounded before.
        suffix: last part of the name of the tensor with the codes.
        parts: rows and columns of a linear -> its stored tensors.
        not_read: suffixes of parts that no engine minds the absence of.
        block: rows and columns of one block; of formats in blocks.
    """

    layout: str
    signature: str
    weight_dtype: str
    granularity: str
    group_size: int | None
    first_stage: bool = False
    suffix: str
    parts: Callable[[int, int], Parts]
    not_read: tuple[str, ...] = _SYMMETRIC
    block: tuple[int, int] = BLOCK

    @property
    def has_global_scale(self) -> bool:
        """Whether one scale of the whole matrix lies over those of its groups."""
        return self.weight_dtype in _GLOBAL_SCALES


class Group(NamedTuple):
    """The linears that `targets` name, by module or by class."""

    targets: tuple[str, ...]
    scheme: LinearScheme


def of_declared(scheme: DeclaredScheme) -> LinearScheme:
    """What this package decodes, as engines take it: scales in any float dtype."""
    names = [scheme.layout.name, scheme.weight_dtype.removesuffix("_e4m3")]
    if not scheme.number.only_groups:
        size = scheme.group_size if scheme.granularity == "group" else None
        names.append(f"{scheme.granularity}{size or ''}{'+fp8' if scheme.first_stage else ''}")
    return LinearScheme(
        layout=scheme.layout.name,
        signature=" ".join([*names, scheme.activations]),
        weight_dtype=scheme.weight_dtype,
        granularity=scheme.granularity,
        group_size=scheme.group_size,
        first_stage=scheme.first_stage is not None,
        suffix=weight_suffix(scheme),
        parts=lambda rows, columns: in_any_float(stored_parts(scheme, rows, columns)),
    )


def in_any_float(parts: Parts) -> Parts:
    """Engines copy a float of one dtype into a parameter of another, powers of two as well."""
    return {
        suffix: Part(ANY_FLOAT if set(part.dtypes) <= set(FLOAT_DTYPES) else part.dtypes,
                     part.shape)
        for suffix, part in parts.items()
    }  # fmt: skip


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
    block: tuple[int, int] = BLOCK,
) -> LinearScheme:
    """A scheme under the signature "layout dtype granularity activations".

    Args:
        dtype: of the codes; "+" after it: with zero points, "=": of AWQ, without, "@": a whole
            byte for each code; "awq-int4": packed as AWQ does.
        granularity: "" of formats that have one only.
        group_size: None where there are no groups.
        parts: see `LinearScheme`.
        not_read: see `LinearScheme`.
        block: see `LinearScheme`.
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
        block=block,
    )


def block_of(key: str, value: object) -> tuple[int, int]:
    """Rows and columns of the blocks that a declaration has in [rows, columns]."""
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        not_read(key, value)
    return sizes[0], sizes[1]


def scales_of_blocks(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """One scale for each block, the last of which may be less than whole."""
    return -(-rows // block[0]), -(-columns // block[1])


def count(columns: int, size: int | None) -> int:
    """Groups in so many columns; engines cut a last part of a group off."""
    return columns // (size or columns)


def words(number: int, bits: int) -> int:
    """Words of 32 bits for so many codes."""
    return -(-number * bits // 32)
