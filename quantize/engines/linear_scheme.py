"""How a linear is stored, as engines see it: what they choose its class by, and its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...recipes.formats import NUMBER_FORMATS
from ..stored.layouts.scheme import FLOAT_DTYPES, FP8_DTYPE, GROUPS, Part, Parts

ANY_FLOAT = (*FLOAT_DTYPES, "F8_E8M0")
SYMMETRIC = ("weight_shape", "weight_zero_point", "weight_zero_point_2", "g_idx")
"""No kernel reads them: values are symmetric, and groups in order."""
ONE_GRANULARITY = (*GROUPS, "mxfp8")
_GLOBAL_SCALES = {name for name, number in NUMBER_FORMATS.items() if number.global_scale}
_VALUES = ("weight", "weight_packed")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """By what an engine chooses the class of a linear; rows of schemes.toml name these fields.

    Attributes:
        layout: the quant_method that stores it so.
        dtype: of the values. granularity: what has a scale of its own.
        group_size: inputs of a group; 0 = there are none.
        zero_points: values count from stored ones. says_symmetric: AWQ declares that they do not.
        unpacked: each value has a whole byte.
        of_fp8: they were rounded to FP8 before.
    """

    layout: str = ""
    dtype: str = ""
    granularity: str = ""
    group_size: int = 0
    activations: str = "none"
    zero_points: bool = False
    says_symmetric: bool = False
    unpacked: bool = False
    of_fp8: bool = False

    def __str__(self) -> str:
        names = {
            "with zero points": self.zero_points,
            "declared as symmetric": self.says_symmetric,
            "in bytes": self.unpacked,
            f"{self.granularity}{self.group_size or ''}": self.dtype not in ONE_GRANULARITY,
            "of FP8": self.of_fp8,
        }
        words = [name for name, holds in names.items() if holds]
        return " ".join([self.layout, self.dtype, *words, self.activations])


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScheme:
    """One way to store a linear.

    Attributes:
        suffix: last part of the name of the tensor with the values.
        parts: rows and columns of a linear -> its stored tensors.
        not_read: suffixes of parts whose absence no engine minds.
    """

    signature: Signature
    suffix: str
    parts: Callable[[int, int], Parts]
    not_read: tuple[str, ...] = SYMMETRIC

    @property
    def has_global_scale(self) -> bool:
        """Whether one scale of the whole matrix multiplies those of its groups."""
        return self.signature.dtype in _GLOBAL_SCALES


class Size(NamedTuple):
    """One size of a tensor, by those of its linear; of 4-bit values `per` = 2 are in a byte."""

    of: Literal["rows", "columns", "groups", "blocks of rows", "blocks of columns"]
    per: int = 1
    rounds_up: bool = False


ROWS, COLUMNS, GROUPS_OF_COLUMNS = Size("rows"), Size("columns"), Size("groups")
BLOCKS = (Size("blocks of rows"), Size("blocks of columns"))
PAIRS = Size("columns", 2)
FP8, FLOAT = (FP8_DTYPE,), FLOAT_DTYPES


class TensorForm(NamedTuple):
    """One tensor of a linear; `dtypes`: those that engines take."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[Size | int, ...] = ()


def scheme_of_tensors(
    signature: Signature,
    *tensors: TensorForm,
    not_read: tuple[str, ...] = ("weight_shape",),
) -> LinearScheme:
    """A scheme whose linears are stored in these tensors."""

    def parts(rows: int, columns: int) -> Parts:
        known: Mapping[str, int] = {
            "rows": rows,
            "columns": columns,
            "groups": columns // (signature.group_size or columns or 1),
            "blocks of rows": -(-rows // 128),
            "blocks of columns": -(-columns // 128),
        }

        def number(size: Size | int) -> int:
            if isinstance(size, int):
                return size
            whole = known[size.of]
            return -(-whole // size.per) if size.rounds_up else whole // size.per

        return {each.suffix: Part(each.dtypes, tuple(map(number, each.shape))) for each in tensors}

    suffix = next(each.suffix for each in tensors if each.suffix in _VALUES)
    return LinearScheme(signature=signature, suffix=suffix, parts=parts, not_read=not_read)
