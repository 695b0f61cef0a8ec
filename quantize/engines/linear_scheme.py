"""How a declaration says that a linear is stored and computed, as an engine takes it.

`stored.layouts.DeclaredScheme` is what this package can decode. Engines take more than that: other
group sizes, zero points, INT8, MXFP8, several schemes in one draft. Here they are shapes only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..stored.declarations import DeclaredScheme
from ..stored.layouts.scheme import FLOAT_DTYPES, Part, Parts
from ..stored.parts import stored_parts, weight_suffix

_SYMMETRIC = ("weight_shape", "weight_zero_point", "weight_zero_point_2")
"""No kernel reads them: codes are symmetric."""


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


class Group(NamedTuple):
    """The linears that `targets` name, by module or by class."""

    targets: tuple[str, ...]
    scheme: LinearScheme


def of_declared(scheme: DeclaredScheme) -> LinearScheme:
    """What this package decodes, as engines take it: scales in any float dtype."""
    names = [scheme.layout.name, scheme.weight_dtype.removesuffix("_e4m3")]
    if scheme.weight_dtype in ("int4", "fp8_e4m3"):
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
    """Engines copy a float of one dtype into a parameter of another."""
    return {
        suffix: Part(FLOAT_DTYPES if set(part.dtypes) <= set(FLOAT_DTYPES) else part.dtypes,
                     part.shape)
        for suffix, part in parts.items()
    }  # fmt: skip
