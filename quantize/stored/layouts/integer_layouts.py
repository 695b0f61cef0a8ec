"""Packed integers: AutoAWQ (`gemm`), GPTQ as GPTQModel 7.7 and AutoGPTQ store it, AutoRound 0.15.

Only AWQ with the constant zero point 8 is written. AutoRound packs codes like GPTQ or AWQ; its
other formats (FP8, MXFP4, NVFP4) are refused: its export to compressed-tensors has them.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from typing_extensions import override

from ....recipes.schema import Recipe, StoredLayoutName
from .declaration_reader import INTEGERS_NO_MEANING, ObjectReader
from .scheme import (
    FLOAT_DTYPES,
    INTEGERS,
    DeclaredScheme,
    Others,
    PackMethod,
    Part,
    Parts,
    StoredLayout,
    Zeros,
    words,
)

_WORD = 32
V1, V2 = "gptq", "gptq_v2"
_KEPT, _OTHERWISE = "-:", "+:"
_KEPT_BITS = 16
_REGEX = frozenset("*+?[](){}|^$\\")
SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Sizes of groups, besides -1: one group for each row."""


def check_integers(keys: ObjectReader) -> None:
    """Weights are integers of one stage; inputs and the KV cache are not quantized."""
    keys.skip(*INTEGERS_NO_MEANING)
    keys.optional("data_type", "int", None)
    keys.optional("act_bits", 16, 32, None)
    keys.absent("static_attention_dtype", "static_kv_dtype", "super_bits", "super_group_size")


class _PackedIntegers(StoredLayout):
    """What these layouts share: names, and that rows of codes and scales are inputs or groups."""

    companions = frozenset({"qweight", "qzeros", "scales"})
    signed_scales = True

    codes, scales = "qweight", "scales"

    @override
    def transposed(self, scheme: DeclaredScheme) -> bool:
        return True


class StoredAwq(_PackedIntegers):
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out] float16."""

    name: StoredLayoutName = "awq"
    exclude_keys = ("modules_to_not_convert",)
    zero_points = MappingProxyType({"qzeros": 0x88})  # two nibbles of 8
    unsigned = True

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        # AutoAWQ's own file spells two keys differently
        keys.choice("w_bit" if keys.has("w_bit") and not keys.has("bits") else "bits", 4)
        # AutoRound says false for symmetric values, and stores their zero points all the same.
        zeros = keys.choice("zero_point", True, False)
        if keys.strictness != "engine":  # files of GEMV load like those of GEMM
            keys.value("version", "gemm", "gemm", "GEMM")
        check_integers(keys)
        keys.skip("sym")
        spelled = keys.has("q_group_size") and not keys.has("group_size")
        size = keys.choice("q_group_size" if spelled else "group_size", -1, *SIZES)
        numbers = _Numbers(bits=4, group_size=size, symmetric=True, ordered=False)
        return numbers.scheme(_Packing(layout=self if zeros else _SYMMETRIC, method="reorder"))

    @override
    def declaration(self, recipe: Recipe, excludes: list[str], rest: Others = ()) -> dict[str, Any]:
        return {
            "bits": 4,
            "group_size": recipe.weights.group_size,
            "modules_to_not_convert": excludes,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }

    @override
    def excludes_module(self, pattern: str, module: str) -> bool:
        """A pattern matches a part of the name."""
        return pattern in module

    @override
    def parts(self, scheme: DeclaredScheme, rows: int, columns: int) -> Parts:
        groups = -(-columns // (scheme.group_size or columns))
        return {
            "qweight": Part(("I32",), (columns, words(rows))),
            "qzeros": Part(("I32",), (groups, words(rows))),
            "scales": Part(FLOAT_DTYPES, (groups, rows)),
        }

    @override
    def zeros(self, scheme: DeclaredScheme) -> Zeros | None:
        return Zeros("qzeros")


class _SymmetricAwq(StoredAwq):
    """Declared without zero points: stored ones must be 8."""

    declares_symmetry = True


_SYMMETRIC = _SymmetricAwq()


class _Packing(NamedTuple):
    layout: StoredLayout
    version: str | None = None
    method: PackMethod | None = None


class _Numbers(NamedTuple):
    bits: int
    group_size: int
    symmetric: bool
    ordered: bool

    @classmethod
    def read(
        cls, keys: ObjectReader, others: "_Numbers | None", bits: tuple[int, ...], *, ordered: bool
    ) -> "_Numbers":
        """Read the packing of some linears; for all (without `others`) each number must be set."""
        usual = others or (None, None, None, None)
        return cls(
            keys.value("bits", usual[0], *bits),
            keys.value("group_size", usual[1], -1, *SIZES),
            keys.value("sym", usual[2], True, False),
            keys.value("desc_act", usual[3], True, False) if ordered else False,
        )

    def scheme(self, packing: _Packing) -> DeclaredScheme:
        """The scheme of linears with this packing."""
        size = None if self.group_size == -1 else self.group_size
        return DeclaredScheme(
            layout=packing.layout, weight_dtype=INTEGERS[self.bits],
            granularity="group" if size else "channel", group_size=size,
            pack_method=packing.method, asymmetric=not self.symmetric,
            ordered=self.ordered and size is not None, version=packing.version,
        )  # fmt: skip


def _with_others(
    keys: ObjectReader,
    packing: _Packing,
    others: Iterable[tuple[str, ObjectReader]],
    *,
    ordered: bool,
) -> DeclaredScheme:
    """The scheme of most linears, and those of `others`, which give their differences by target."""
    bits = (4,) if packing.method else tuple(INTEGERS)
    whole, schemes = _Numbers.read(keys, None, bits, ordered=ordered), []
    for target, reader in others:
        check_integers(reader)
        scheme = _Numbers.read(reader, whole, bits, ordered=ordered).scheme(packing)
        reader.finish()
        schemes.append(dataclasses.replace(scheme, targets=(target,)))
    return dataclasses.replace(whole.scheme(packing), others=tuple(schemes))


class StoredGptq(_PackedIntegers):
    """`qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out].

    `g_idx` [in] gives the group of each input. In version `gptq` a stored zero point is one less
    than it means, in `gptq_v2` it is what it means.
    """

    name: StoredLayoutName = "gptq"
    exclude_keys = ()
    declares_symmetry = True
    lists_layers_only = True
    companions = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    codes_along_inputs = True

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        check_integers(keys)
        version = keys.value("checkpoint_format", V1, V1, V2)
        keys.optional("format", None, version)
        keys.optional("method", None, "gptq")
        keys.optional("pack_dtype", None, "int32")
        keys.absent("is_marlin_format", "adapter", "rotation")
        others = []
        for pattern, reader in keys.named("dynamic").items():
            reader.skip("mse", "act_group_aware")
            if not pattern.startswith(_KEPT):
                others.append((f"re:{pattern.removeprefix(_OTHERWISE)}", reader))
        packing = _Packing(self, version if version != V1 else None)
        return _with_others(keys, packing, others, ordered=True)

    @override
    def excludes(self, keys: ObjectReader) -> tuple[str, ...]:
        """The first rule that matches a name decides, as in engines' `get_dynamic_override`."""
        kept, before = [], list[str]()
        for pattern in keys.named("dynamic"):
            plain = pattern.removeprefix(_KEPT if pattern.startswith(_KEPT) else _OTHERWISE)
            if not pattern.startswith(_KEPT):
                before.append(plain)
                continue
            unless = f"(?!{'|'.join(f'(?:{each})' for each in before)})" if before else ""
            kept.append(f"re:{unless}(?:{plain})" if before else f"re:{plain}")
        return tuple(kept)

    @override
    def parts(self, scheme: DeclaredScheme, rows: int, columns: int) -> Parts:
        bits, groups = scheme.number.bits, -(-columns // (scheme.group_size or columns))
        return {
            "qweight": Part(("I32",), (-(-columns * bits // _WORD), rows)),
            "qzeros": Part(("I32",), (groups, -(-rows * bits // _WORD))),
            "scales": Part(FLOAT_DTYPES, (groups, rows)),
            "g_idx": Part(("I32",), (columns,), optional=not scheme.ordered),
        }

    @override
    def zeros(self, scheme: DeclaredScheme) -> Zeros | None:
        return Zeros("qzeros", plus=0 if scheme.version == V2 else 1)


class _PackedAsAwq(StoredAwq):
    """AutoRound's: symmetric or not, always with zero points."""

    name: StoredLayoutName = "auto-round"
    declares_symmetry = True
    lists_layers_only = True


class StoredAutoRound(StoredGptq):
    """`packing_format` says how codes are packed, and whether a zero point is stored less one.

    Packed like GPTQ, it has no `g_idx`, or a trivial one.
    """

    name: StoredLayoutName = "auto-round"

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        check_integers(keys)
        keys.optional("backend", "auto", None)
        packing = PACKINGS[keys.value("packing_format", next(iter(PACKINGS)), *PACKINGS)]
        named = keys.named("extra_config").items()
        others = [(_target(name), r) for name, r in named if not r.says("bits", _KEPT_BITS)]
        return _with_others(keys, packing, others, ordered=False)

    @override
    def excludes(self, keys: ObjectReader) -> tuple[str, ...]:
        kept = keys.named("extra_config").items()
        return tuple(_target(name) for name, reader in kept if reader.says("bits", _KEPT_BITS))


_AS_GPTQ = StoredAutoRound()
PACKINGS: Mapping[str, _Packing] = {
    "auto_round:auto_gptq": _Packing(_AS_GPTQ),
    "auto_round:gptqmodel": _Packing(_AS_GPTQ, V2),
    "auto_round": _Packing(_AS_GPTQ, V2),
    "auto_round:exllamav2": _Packing(_AS_GPTQ, V2),
    "auto_round:tritonv2": _Packing(_AS_GPTQ, V2),
    "auto_round:auto_awq": _Packing(_PackedAsAwq(), method="reorder"),
}
"""As AutoRound chooses them (`dynamic_import_quant_linear_for_packing`)."""


def _target(name: str) -> str:
    """AutoRound takes a name with any of these characters as a regular expression."""
    return f"re:{name}" if _REGEX & set(name) else name
