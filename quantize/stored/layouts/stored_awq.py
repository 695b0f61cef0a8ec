"""AutoAWQ, version `gemm`: INT4 groups with zero points; this package writes 8 alone."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from ....recipes.formats import NUMBER_FORMATS
from ....recipes.schema import Recipe, StoredLayoutName
from .integer_keys import SIZES, check_integers
from .reader import ObjectReader
from .scheme import FLOAT_DTYPES, DeclaredScheme, OwnFormat, Part, Parts, StoredLayout, Zeros, words


class StoredAwq(StoredLayout):
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out] float16."""

    name: StoredLayoutName = "awq"
    exclude_keys = ("modules_to_not_convert",)
    companions = frozenset({"qweight", "qzeros", "scales"})
    zero_points = MappingProxyType({"qzeros": 0x88})  # two nibbles of 8
    nibble_offset = 8
    signed_scales = True

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        # AutoAWQ's own file spells two keys otherwise
        keys.choice("w_bit" if keys.has("w_bit") and not keys.has("bits") else "bits", 4)
        engine = keys.strictness == "engine"
        # AutoRound says false of symmetric values, and stores their zero points all the same.
        zeros = keys.choice("zero_point", True, *(() if engine else (False,)))
        keys.value("version", "gemm", "gemm", "GEMM")
        check_integers(keys)
        keys.skip("sym")
        spelled = keys.has("q_group_size") and not keys.has("group_size")
        sizes = NUMBER_FORMATS["int4"].sizes["group"] if engine else SIZES
        size = keys.choice("q_group_size" if spelled else "group_size", -1, *sizes)
        return DeclaredScheme(
            layout=self if zeros else _SYMMETRIC,
            weight_dtype="int4",
            granularity="channel" if size == -1 else "group",
            group_size=None if size == -1 else size,
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
        groups = -(-columns // (scheme.group_size or columns))
        return {
            "qweight": Part(("I32",), (columns, words(rows))),
            "qzeros": Part(("I32",), (groups, words(rows))),
            "scales": Part(FLOAT_DTYPES, (groups, rows)),
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


class _SymmetricAwq(StoredAwq):
    """Declared to have no zero points: those that are stored have to be 8."""

    declares_symmetry = True


_SYMMETRIC = _SymmetricAwq()
