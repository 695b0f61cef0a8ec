"""How a declaration says that linears are stored and computed, as engines take it.

`stored.layouts.DeclaredScheme` is what this package can decode. Engines take more than that, and
less strictly: other group sizes, zero points, INT8, MXFP8, several schemes in one draft. Here they
are shapes only, written as "NAME DTYPE [SIZES]" of each tensor (`_stored`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ...recipes.formats import NUMBER_FORMATS
from ..stored.layouts.scheme import FLOAT_DTYPES, FP8_DTYPE, GROUPS, DeclaredScheme, Part, Parts
from ..stored.stored_declaration import stored_parts

BLOCK = (128, 128)
ANY_FLOAT = (*FLOAT_DTYPES, "F8_E8M0")
Declared = Mapping[str, Any]
_SYMMETRIC = ("weight_shape", "weight_zero_point", "weight_zero_point_2")
"""No kernel reads them: values are symmetric."""
_ONE_GRANULARITY = (*GROUPS, "mxfp8")
_GLOBAL_SCALES = {name for name, number in NUMBER_FORMATS.items() if number.global_scale}
_DTYPES = {"F8": (FP8_DTYPE,), "F": FLOAT_DTYPES, "A": ANY_FLOAT}
"""Of `_stored`; others are dtypes of safetensors."""
_TENSOR = re.compile(r"(\w+) (\w+) \[(.*?)\]")
_VALUES = ("weight", "weight_packed", "qweight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScheme:
    """One way to store a linear.

    Attributes:
        layout: the quant_method that stores it so.
        signature: key of schemes.toml, such as "quark int4 group128 none".
        first_stage: values were rounded to another format before.
        suffix: last part of the name of the tensor with the values.
        parts: rows and columns of a linear -> its stored tensors.
        not_read: suffixes of parts that no engine minds the absence of.
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
        suffix=scheme.layout.weight_suffix(scheme),
        parts=lambda rows, columns: _in_any_float(stored_parts(scheme, rows, columns)),
    )


def _in_any_float(parts: Parts) -> Parts:
    """Engines copy a float of one dtype into a parameter of another, powers of two as well."""
    floats = set(FLOAT_DTYPES)
    return {
        suffix: Part(ANY_FLOAT, part.shape) if set(part.dtypes) <= floats else part
        for suffix, part in parts.items()
    }


class NotReadError(Exception):
    """A declaration says something of which it is not known what engines make of it."""


def not_read(key: str, value: object) -> NoReturn:
    """Give up at a key."""
    raise NotReadError(f"{key} {value!r}")


def mapping(key: str, value: object) -> Declared:
    """A section of a declaration, of any JSON type, as an object."""
    return value if isinstance(value, Mapping) else not_read(key, value)


def linear_scheme(
    layout: str,
    dtype: str,
    granularity: str,
    size: int | None,
    activations: str,
    stored: str,
    *,
    bits: int = 4,
    not_read: tuple[str, ...] = ("weight_shape",),
    block: tuple[int, int] = BLOCK,
) -> LinearScheme:
    """A scheme under the signature "layout dtype granularity activations".

    Args:
        dtype: of the values; "+" after it: with zero points, "=": of AWQ, without, "@": a whole
            byte for each value; "awq-int4": packed as AWQ does.
        granularity: "" of formats that have one only.
        size: of a group; None where there are no groups.
        stored: as `_stored` reads it.
        bits: of one value in words.
    """
    own = dtype not in _ONE_GRANULARITY
    names = [layout, dtype, *([f"{granularity}{size or ''}"] if own else []), activations]
    suffixes = [match[1] for match in _TENSOR.finditer(stored)]
    return LinearScheme(
        layout=layout,
        signature=" ".join(name for name in names if name),
        weight_dtype={"fp8": "fp8_e4m3"}.get(dtype, dtype.rstrip("+@=")),
        granularity=granularity if own else "group",
        group_size=size,
        suffix=next(suffix for suffix in suffixes if suffix in _VALUES),
        parts=lambda rows, columns: _stored(stored, rows, columns, size, bits, block),
        not_read=not_read,
        block=block,
    )


def _stored(
    text: str, rows: int, columns: int, size: int | None, bits: int, block: tuple[int, int]
) -> Parts:
    """Tensors by suffix, of "weight F8 [r c], weight_scale F []".

    Sizes are r rows, c columns, g whole groups of columns (G: begun ones, too), R and C blocks
    along both, rw and cw words of 32 bits along both, and numbers; c/16 is a sixteenth of c.
    """
    group = size or columns or 1
    known = {
        "r": rows,
        "c": columns,
        "g": columns // group,
        "G": -(-columns // group),
        "R": -(-rows // block[0]),
        "C": -(-columns // block[1]),
        "rw": -(-rows * bits // 32),
        "cw": -(-columns * bits // 32),
    }

    def number(word: str) -> int:
        name, _, by = word.partition("/")
        return known[name] // int(by or 1) if name in known else int(name)

    return {
        suffix: Part(_DTYPES.get(dtype, (dtype,)), tuple(map(number, sizes.split())))
        for suffix, dtype, sizes in _TENSOR.findall(text)
    }


def block_of(key: str, value: object) -> tuple[int, int]:
    """Rows and columns of the blocks that a declaration has in [rows, columns]."""
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        not_read(key, value)
    return sizes[0], sizes[1]
