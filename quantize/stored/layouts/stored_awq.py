"""AutoAWQ, version `gemm`: INT4 groups with the constant zero point 8 (symmetric)."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from ....recipes.formats import NUMBER_FORMATS
from ....recipes.schema import Recipe, StoredLayoutName
from .reader import ObjectReader
from .scheme import DeclaredScheme, OwnFormat, Part, Parts, StoredLayout, Zeros, group_count, words


class StoredAwq(StoredLayout):
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out] float16."""

    name: StoredLayoutName = "awq"
    exclude_keys = ("modules_to_not_convert",)
    companions = frozenset({"qweight", "qzeros", "scales"})
    zero_points = MappingProxyType({"qzeros": 0x88})  # two nibbles of 8
    nibble_offset = 8

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        # Engines also take -1, one group for the whole row
        keys.choice("bits", 4)
        keys.choice("zero_point", True)
        keys.choice("version", "gemm", "GEMM")
        whole_rows = keys.strictness == "engine" and keys.says("group_size", -1)
        sizes = NUMBER_FORMATS["int4"].sizes["group"]
        return DeclaredScheme(
            layout=self,
            weight_dtype="int4",
            granularity="channel" if whole_rows else "group",
            group_size=None if whole_rows else keys.choice("group_size", *sizes),
            pack_method="reorder",
            activations="none",
        )

    @override
    def complete(
        self, recipe: Recipe, excludes: list[str], own: Sequence[OwnFormat] = ()
    ) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "zero_point": True,
            "group_size": recipe.weights.group_size,
            "modules_to_not_convert": excludes,
        }

    @override
    def excludes_module(self, pattern: str, module: str) -> bool:
        """A part of the name."""
        return pattern in module

    @override
    def parts(
        self, scheme: DeclaredScheme, rows: int, columns: int, scale_dtypes: tuple[str, ...]
    ) -> Parts:
        groups = group_count(scheme, columns)
        return {
            "qweight": Part(("I32",), (columns, words(rows))),
            "qzeros": Part(("I32",), (groups, words(rows))),
            "scales": Part(("F16",), (groups, rows)),
        }

    @override
    def weight_suffix(self, scheme: DeclaredScheme) -> str:
        return "qweight"

    @override
    def scale_suffix(self, scheme: DeclaredScheme) -> str:
        return "scales"

    @override
    def zeros(self, scheme: DeclaredScheme) -> Zeros | None:
        return Zeros("qzeros")

    @override
    def transposed(self, scheme: DeclaredScheme) -> bool:
        return True
