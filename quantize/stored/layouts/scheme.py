"""`DeclaredScheme`: what a declaration says, in one form; `StoredLayout`: what reads a layout."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from typing_extensions import TypeIs

from ....recipes.errors import LayoutError
from ....recipes.formats import (
    NUMBER_FORMATS,
    Granularity,
    GroupedActivations,
    KvCacheDtype,
    NumberFormat,
    WeightDtype,
)
from ....recipes.schema import ActivationFormat, Recipe, StoredLayoutName
from ...files.safetensors_header import TensorInfo
from .declaration_reader import ObjectReader
from .module_patterns import is_regex_match

StoredDtype = Literal[WeightDtype, "int2", "int3"]


def _integer(bits: int) -> NumberFormat:
    """Two's complement, packed into words of 32 bits unless a layout says otherwise."""
    return NumberFormat(
        bits=bits, kind="int", largest=2 ** (bits - 1) - 1, sizes={}, stored_dtype="I32",
        codes_per_element=32 // bits, scale_dtype=None,
    )  # fmt: skip


_OF_OTHER_TOOLS: Mapping[StoredDtype, NumberFormat] = {
    "int2": _integer(2),
    "int3": _integer(3),
}
INTEGERS: Mapping[int, StoredDtype] = {
    **{number.bits: dtype for dtype, number in _OF_OTHER_TOOLS.items()},
    **{number.bits: dtype for dtype, number in NUMBER_FORMATS.items() if number.is_integer},
}
"""Number formats by bits."""


def is_of_recipes(dtype: StoredDtype) -> TypeIs[WeightDtype]:
    """True if recipes have this dtype."""
    return dtype in NUMBER_FORMATS


FLOAT_DTYPES = ("BF16", "F16", "F32")
FP8_DTYPE = "F8_E4M3"
NIBBLES_PER_WORD = 8
"""INT4 codes in 32 bits."""
PackMethod = Literal["order", "reorder"]
PACK_METHODS: tuple[PackMethod, ...] = ("order", "reorder")
Activations = Literal[
    "none", "token-dynamic", "tensor-static", "tensor-dynamic", "group-dynamic",
    "group-dynamic-64", GroupedActivations,
]  # fmt: skip
GROUPS: Mapping[str, int] = {
    dtype: number.sizes["group"][0]
    for dtype, number in NUMBER_FORMATS.items()
    if number.only_groups
}
"""Activations that are named by their number format -> inputs that share a scale."""
INVERTED: tuple[str, ...] = tuple(
    dtype for dtype, number in NUMBER_FORMATS.items() if number.global_scale
)
"""Activations with a static scale over those of groups; kernels multiply by its inverse."""
_ACTIVATIONS: Mapping[Activations, ActivationFormat | None] = {
    "none": None,
    "token-dynamic": ActivationFormat(dtype="fp8_e4m3", granularity="token", dynamic=True),
    "tensor-static": ActivationFormat(dtype="fp8_e4m3", granularity="tensor", dynamic=False),
    "group-dynamic": ActivationFormat(dtype="fp8_e4m3", granularity="group", dynamic=True),
    **{
        dtype: ActivationFormat(dtype=dtype, granularity="group", dynamic=True)
        for dtype in get_args(GroupedActivations)
    },
}
_NAMES: Mapping[ActivationFormat | None, Activations] = {
    activations: name for name, activations in _ACTIVATIONS.items()
}


def declared_activations(activations: ActivationFormat | None) -> Activations:
    """How every layout's declaration is read for a recipe with these activations."""
    return _NAMES[activations]


EVERY_LINEAR = ("Linear",)
"""The class that means all linears that no other target names."""
_SAID_IF_SO = ("kv_cache", "asymmetric", "ordered", "version", "block_rows", "cache_per_head")
"""Fields that a scheme's JSON has only where they have a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredScheme:
    """How every linear that is not excluded is stored: w ≈ code * scale (* that of a first stage).

    A declaration may have several, each for some linears: the first one then holds the `others`.

    Attributes:
        first_stage: INT4 codes are of values rounded to it first, under one scale for the matrix.
        pack_method: which column each part of a word of integers holds; None for other dtypes.
        activations: the rounding of inputs at run time: to FP8 per token, per tensor (stored or
            computed) or per 128 inputs, to NVFP4 or MXFP4.
        targets: its linears: names, patterns of names, or `EVERY_LINEAR`.
        asymmetric: codes count from stored zero points, not from the middle of their range.
        ordered: the group of each input is stored.
        version: of a layout that has several, where it changes what stored numbers mean.
        block_rows: of a block that is not square; None: as many as inputs.
        cache_per_head: the KV cache has a scale for each key-value head, not one for each layer.
    """

    layout: "StoredLayout"
    weight_dtype: StoredDtype
    granularity: Granularity
    pack_method: PackMethod | None = None
    activations: Activations = "none"
    excludes: tuple[str, ...] = ()
    kv_cache: KvCacheDtype | None = None
    group_size: int | None = None
    first_stage: Literal["fp8_e4m3"] | None = None
    targets: tuple[str, ...] = EVERY_LINEAR
    others: tuple["DeclaredScheme", ...] = ()
    asymmetric: bool = False
    ordered: bool = False
    version: str | None = None
    block_rows: int | None = None
    cache_per_head: bool = False

    def of(self, module: str) -> "DeclaredScheme | None":
        """How the linear of this name is stored; None where no target means it.

        As in engines, names are tried first, in order, then the scheme for every other linear.
        """
        if not self.others and self.targets == EVERY_LINEAR:
            return self
        groups = (dataclasses.replace(self, others=()), *self.others)
        for group in groups:
            # A target names modules in the way of an exclude.
            if any(self.layout.excludes_module(target, module) for target in group.targets):
                return group
        return next((group for group in groups if set(EVERY_LINEAR) & set(group.targets)), None)

    @property
    def number(self) -> NumberFormat:
        """The facts of the number format of the weights."""
        dtype = self.weight_dtype
        return NUMBER_FORMATS[dtype] if is_of_recipes(dtype) else _OF_OTHER_TOOLS[dtype]

    @property
    def has_signed_scales(self) -> bool:
        """True if scales may be negative: AutoRound's are, where the largest weight is positive."""
        return self.number.is_integer and self.layout.signed_scales

    @property
    def rows_of_scale(self) -> int:
        """Rows that share a scale; 1 except for blocks."""
        return (self.block_rows or self.group_size or 1) if self.granularity == "block" else 1

    def activation_format(self) -> ActivationFormat | None:
        """The format of the inputs, None where they are not rounded; or LayoutError."""
        if self.activations not in _ACTIVATIONS:
            raise LayoutError(
                f"activations {self.activations}",
                "expected FP8 scales per token, or static ones: no recipe has the format of this"
                " folder",
                fix="quantize the BF16 draft with a recipe instead",
            )
        return _ACTIVATIONS[self.activations]

    @property
    def transposed(self) -> bool:
        """True if scales are stored [groups, out], and codes as well."""
        return self.layout.transposed(self)

    @property
    def scales_whole_matrix(self) -> bool:
        """True if one stored number scales the whole weight."""
        whole = self.granularity == "tensor" or self.number.global_scale
        return whole or self.first_stage is not None

    def is_excluded(self, module: str) -> bool:
        """True if a pattern matches the name `module`, by the rule of the layout."""
        return any(self.layout.excludes_module(pattern, module) for pattern in self.excludes)

    def asks_for_head(self, module: str) -> bool:
        """True if engines take a head of this name as quantized unless it is excluded."""
        targets = [name for each in (self, *self.others) for name in each.targets]
        named = any(self.layout.excludes_module(target, module) for target in targets)
        return self.layout.heads_are_linears or (self.layout.names_heads and named)

    def to_mapping(self) -> dict[str, Any]:
        """The scheme as JSON values; if there are several, each with its targets."""
        mapping = {field.name: getattr(self, field.name) for field in fields(self)}
        mapping["layout"] = self.layout.name
        del mapping["targets"], mapping["others"]
        for key in _SAID_IF_SO:
            if not mapping[key]:
                del mapping[key]
        if not self.others:
            return mapping
        others = [{**each.to_mapping(), "targets": each.targets} for each in self.others]
        return mapping | {"targets": self.targets, "others": others}

    def __str__(self) -> str:
        size = f" of {self.group_size}" if self.group_size else ""
        size = f" of {self.block_rows}x{self.group_size}" if self.block_rows else size
        packing = f" ({self.pack_method})" if self.pack_method else ""
        of = f" of {self.first_stage} per tensor" if self.first_stage else ""
        zeros = ", asymmetric" if self.asymmetric else ""
        order = ", inputs ordered by activation" if self.ordered else ""
        weights = f"{self.weight_dtype} per {self.granularity}{size}{of}{packing}{zeros}{order}"
        cache = f", KV cache {self.kv_cache}" if self.kv_cache else ""
        text = f"{self.layout.name} {weights}, activations {self.activations}{cache}"
        more = (f"; {' '.join(each.targets)}: {each}" for each in self.others)
        return text + "".join(more)


class Part(NamedTuple):
    """One stored tensor of a quantized linear; any of `dtypes`, and of the shapes, is right.

    Without `dtypes`: INT4 scales, in the dtype of the weight before it was quantized.
    """

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False
    or_shape: tuple[int, ...] | None = None

    def fits(self, tensor: TensorInfo | None) -> bool:
        """True if this tensor, or no tensor, is as expected."""
        if tensor is None:
            return self.optional
        return tensor.dtype in self.dtypes and tensor.shape in (self.shape, self.or_shape)


Parts = dict[str, Part]
"""The stored tensors of a linear by suffix ("weight", "weight_scale", ...)."""


class OwnFormat(NamedTuple):
    """Linears in another format than the recipe's: the recipe in that format, as stored.

    `leaves` are the last parts of their names, and of the fused names that engines use.
    """

    recipe: Recipe
    leaves: tuple[str, ...]


Others = Sequence[OwnFormat]
"""What a recipe quantizes in other formats than its first one."""


class SideFile(NamedTuple):
    """A second declaration beside config.json.

    `check` raises VerifyError where it says something else; `content` is what is written.
    """

    name: str
    what: str
    check: Callable[[Path, DeclaredScheme, Mapping[str, Any]], None]
    content: Callable[[Mapping[str, Any]], dict[str, Any]]


class Zeros(NamedTuple):
    """Stored zero points, packed along the outputs; `plus` is added to what is stored.

    `outputs_first`: [outputs, groups] instead of [groups, outputs].
    """

    suffix: str
    plus: int = 0
    outputs_first: bool = False


class StoredLayout(ABC):
    """All that reading one layout needs, and how this package declares it.

    Attributes:
        zero_points: suffix -> every byte of the zero points of symmetric codes.
        codes_along_inputs: transposed codes are packed along the inputs, not along the outputs.
        unsigned: integers are stored as code + half of their range, else as two's complement.
        foreign_scale_dtypes: of INT4 scales that other writers store, whatever the weight's is.
        names_heads: engines take a head as quantized only where a target names it.
        heads_are_linears: they do so unless it is excluded. With neither they never do.
        signed_scales: scales of integers may be negative where another tool made the folder.
        lists_layers_only: only linears of decoder layers are quantized and excluded by name.
    """

    name: StoredLayoutName
    exclude_keys: tuple[str, ...]
    codes: str = "weight"
    scales: str = "weight_scale"
    companions: frozenset[str]
    zero_points: Mapping[str, int] = MappingProxyType({})
    unsigned: bool = False
    codes_along_inputs: bool = False
    foreign_scale_dtypes: tuple[str, ...] = ()
    side_file: SideFile | None = None
    names_heads: bool = False
    heads_are_linears: bool = False
    signed_scales: bool = False
    declares_symmetry: bool = False
    lists_layers_only: bool = False

    @abstractmethod
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        """Read a `quantization_config` of this layout, except its excludes."""

    def excludes(self, keys: ObjectReader) -> tuple[str, ...]:
        """The patterns of a `quantization_config`, as written."""
        (key,) = self.exclude_keys
        return keys.strings(key)

    def declaration(self, recipe: Recipe, excludes: list[str], rest: Others = ()) -> dict[str, Any]:  # noqa: ARG002
        """The whole `quantization_config` that this package writes for a recipe of one format."""
        raise ValueError(f"{recipe.name}: no recipe has layout {self.name}")

    def excludes_module(self, pattern: str, module: str) -> bool:
        """True if an exclude matches the name `module`: here `re:` and a pattern, or exactly."""
        return is_regex_match(pattern, module) if pattern.startswith("re:") else pattern == module

    @abstractmethod
    def parts(self, scheme: DeclaredScheme, rows: int, columns: int) -> Parts:
        """The stored tensors of a linear [rows, columns]."""

    def weight_suffix(self, scheme: DeclaredScheme) -> str:  # noqa: ARG002
        """Last part of the name of the tensor with the codes of a quantized linear."""
        return self.codes

    def scale_suffix(self, scheme: DeclaredScheme) -> str:  # noqa: ARG002
        """Last part of the name of the tensor with its scales."""
        return self.scales

    def transposed(self, scheme: DeclaredScheme) -> bool:  # noqa: ARG002
        """True if a row of codes is one input, or a word of several: scales are [groups, out]."""
        return False

    def zeros(self, scheme: DeclaredScheme) -> "Zeros | None":  # noqa: ARG002
        """Where zero points are stored; None where there are none, or only constant ones."""
        return None

    def foreign_quotients_rounded(self, scheme: DeclaredScheme) -> bool:  # noqa: ARG002
        """True if other writers round weight / scale to the weight's dtype before it is a code."""
        return False


def stored_codes(scheme: DeclaredScheme, rows: int, columns: int) -> Part:
    """Codes [rows, columns], packed along the columns."""
    number = scheme.number
    return Part((number.stored_dtype,), (rows, -(-columns // number.codes_per_element)))


def group_count(scheme: DeclaredScheme, columns: int) -> int:
    """Groups along `columns` inputs; one where a row has no groups."""
    return columns // (scheme.group_size or columns)


def words(count: int) -> int:
    """Words of 32 bits that hold `count` INT4 numbers."""
    return -(-count // NIBBLES_PER_WORD)
