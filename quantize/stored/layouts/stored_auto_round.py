"""AutoRound 0.15: codes as GPTQ packs them, or as AWQ does; read, never written.

Other formats than packed integers (FP8, MXFP4, NVFP4) are refused here: AutoRound's export to
compressed-tensors has them.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from typing_extensions import override

from ....recipes.schema import StoredLayoutName
from .integer_keys import SIZES, check_integers
from .name_matching import is_regex_match
from .reader import ObjectReader
from .scheme import DeclaredScheme, Parts, StoredLayout
from .stored_awq import StoredAwq
from .stored_dtypes import INTEGERS
from .stored_gptq import V2, StoredGptq

_KEPT_BITS = 16
_REGEX = frozenset("*+?[](){}|^$\\")


class _PackedAsGptq(StoredGptq):
    """Without `g_idx`, or with one that says nothing."""

    name: StoredLayoutName = "auto-round"


class _PackedAsAwq(StoredAwq):
    """Symmetric or not, always with zero points."""

    name: StoredLayoutName = "auto-round"
    declares_symmetry = True
    lists_layers_only = True


class StoredAutoRound(StoredLayout):
    """`packing_format` says how codes are packed, and whether a zero point is stored less one."""

    name: StoredLayoutName = "auto-round"
    exclude_keys = ()
    companions = StoredGptq.companions
    lists_layers_only = True

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        check_integers(keys)
        keys.optional("backend", "auto", None)
        packing = keys.value("packing_format", next(iter(PACKINGS)), *PACKINGS)
        whole = _scheme(keys, packing, None)
        others = []
        for name, own in keys.named("extra_config").items():
            if not own.says("bits", _KEPT_BITS):
                check_integers(own)
                scheme = _scheme(own, packing, whole)
                own.finish()
                others.append(dataclasses.replace(scheme, targets=(_target(name),)))
        return dataclasses.replace(whole, others=tuple(others))

    @override
    def excludes(self, keys: ObjectReader) -> tuple[str, ...]:
        kept = keys.named("extra_config").items()
        return tuple(_target(name) for name, own in kept if own.says("bits", _KEPT_BITS))

    @override
    def excludes_module(self, pattern: str, module: str) -> bool:
        """`re:` matched from the start, else the whole name."""
        return is_regex_match(pattern, module) if pattern.startswith("re:") else pattern == module

    @override
    def parts(
        self, scheme: DeclaredScheme, rows: int, columns: int, scale_dtypes: tuple[str, ...]
    ) -> Parts:
        raise ValueError("parts are those of a packing")


class _Packing(NamedTuple):
    """How the codes of a `packing_format` are packed, and the version of GPTQ's zero points."""

    layout: StoredLayout
    version: str | None = None


_AS_GPTQ, _AS_AWQ = _PackedAsGptq(), _PackedAsAwq()
PACKINGS: Mapping[str, _Packing] = {
    "auto_round:auto_gptq": _Packing(_AS_GPTQ),
    "auto_round:gptqmodel": _Packing(_AS_GPTQ, V2),
    "auto_round": _Packing(_AS_GPTQ, V2),
    "auto_round:exllamav2": _Packing(_AS_GPTQ, V2),
    "auto_round:tritonv2": _Packing(_AS_GPTQ, V2),
    "auto_round:auto_awq": _Packing(_AS_AWQ),
}
"""As AutoRound chooses them (`dynamic_import_quant_linear_for_packing`)."""


def _scheme(keys: ObjectReader, packing: str, others: DeclaredScheme | None) -> DeclaredScheme:
    """Of one section; what it leaves out is that of the `others`, if there are any."""
    layout, version = PACKINGS[packing]
    all_bits = (4,) if layout is _AS_AWQ else tuple(INTEGERS)
    if others is None:
        bits, size = keys.choice("bits", *all_bits), keys.choice("group_size", -1, *SIZES)
        symmetric = keys.choice("sym", True, False)
    else:
        bits = keys.value("bits", others.number.bits, *all_bits)
        size = keys.value("group_size", others.group_size or -1, -1, *SIZES)
        symmetric = keys.value("sym", not others.asymmetric, True, False)
    return DeclaredScheme(
        layout=layout,
        weight_dtype=INTEGERS[bits],
        granularity="channel" if size == -1 else "group",
        group_size=None if size == -1 else size,
        pack_method="reorder" if layout is _AS_AWQ else None,
        activations="none",
        asymmetric=not symmetric,
        version=version,
    )


def _target(name: str) -> str:
    """AutoRound takes a name with any of these characters for a regular expression."""
    return f"re:{name}" if _REGEX & set(name) else name
