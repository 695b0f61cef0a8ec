"""GPTQ, as GPTQModel 7.7 and AutoGPTQ store it; read, never written."""

import dataclasses
from typing import NamedTuple

from typing_extensions import override

from ....recipes.schema import StoredLayoutName
from .integer_keys import SIZES, check_integers
from .name_matching import is_regex_match
from .reader import ObjectReader
from .scheme import (
    FLOAT_DTYPES,
    DeclaredScheme,
    Part,
    Parts,
    StoredLayout,
    Zeros,
)
from .stored_dtypes import INTEGERS

_WORD = 32
V1, V2 = "gptq", "gptq_v2"
_KEPT, _OTHERWISE = "-:", "+:"


class _Numbers(NamedTuple):
    """What may differ from linear to linear."""

    bits: int
    group_size: int
    symmetric: bool
    ordered: bool

    @classmethod
    def read(cls, keys: ObjectReader, others: "_Numbers | None") -> "_Numbers":
        """Of one section; what it leaves out is that of the `others`, if there are any."""
        either = (True, False)
        if others is None:
            return cls(
                keys.choice("bits", *INTEGERS),
                keys.choice("group_size", -1, *SIZES),
                keys.choice("sym", *either),
                keys.choice("desc_act", *either),
            )
        return cls(
            keys.value("bits", others.bits, *INTEGERS),
            keys.value("group_size", others.group_size, -1, *SIZES),
            keys.value("sym", others.symmetric, *either),
            keys.value("desc_act", others.ordered, *either),
        )


class StoredGptq(StoredLayout):
    """`qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out].

    `g_idx` [in] says which group an input belongs to. Of version `gptq` a stored zero point is one
    less than it means, of `gptq_v2` it is what it means.
    """

    name: StoredLayoutName = "gptq"
    exclude_keys = ()
    declares_symmetry = True
    lists_layers_only = True
    companions = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    codes_along_inputs = True
    signed_scales = True

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        check_integers(keys)
        version = keys.value("checkpoint_format", V1, V1, V2)
        keys.optional("format", None, version)
        keys.optional("method", None, "gptq")
        keys.optional("pack_dtype", None, "int32")
        keys.absent("is_marlin_format", "adapter", "rotation")
        first = _Numbers.read(keys, None)
        others = []
        for pattern, own in keys.named("dynamic").items():
            if not pattern.startswith(_KEPT):
                check_integers(own)
                own.skip("mse", "act_group_aware")
                scheme = self._scheme(_Numbers.read(own, first), version)
                own.finish()
                target = f"re:{pattern.removeprefix(_OTHERWISE)}"
                others.append(dataclasses.replace(scheme, targets=(target,)))
        return dataclasses.replace(self._scheme(first, version), others=tuple(others))

    def _scheme(self, numbers: "_Numbers", version: str) -> DeclaredScheme:
        size = None if numbers.group_size == -1 else numbers.group_size
        return DeclaredScheme(
            layout=self,
            weight_dtype=INTEGERS[numbers.bits],
            granularity="group" if size else "channel",
            group_size=size,
            pack_method=None,
            activations="none",
            asymmetric=not numbers.symmetric,
            ordered=numbers.ordered and size is not None,
            version=version if version != V1 else None,
        )

    @override
    def excludes(self, keys: ObjectReader) -> tuple[str, ...]:
        """The first rule that matches a name decides, as engines' `get_dynamic_override` has it.

        So what an earlier rule quantizes in its own way is not kept by a later one.
        """
        kept, before = [], list[str]()
        for pattern in keys.named("dynamic"):
            own = pattern.removeprefix(_KEPT if pattern.startswith(_KEPT) else _OTHERWISE)
            if not pattern.startswith(_KEPT):
                before.append(own)
                continue
            unless = f"(?!{'|'.join(f'(?:{each})' for each in before)})" if before else ""
            kept.append(f"re:{unless}(?:{own})" if before else f"re:{own}")
        return tuple(kept)

    @override
    def excludes_module(self, pattern: str, module: str) -> bool:
        """`re:` matched from the start, else the whole name."""
        return is_regex_match(pattern, module) if pattern.startswith("re:") else pattern == module

    @override
    def parts(
        self, scheme: DeclaredScheme, rows: int, columns: int, scale_dtypes: tuple[str, ...]
    ) -> Parts:
        return gptq_parts(scheme, rows, columns)

    @override
    def weight_suffix(self, scheme: DeclaredScheme) -> str:
        return "qweight"

    @override
    def scale_suffix(self, scheme: DeclaredScheme) -> str:
        return "scales"

    @override
    def transposed(self, scheme: DeclaredScheme) -> bool:
        return True

    @override
    def zeros(self, scheme: DeclaredScheme) -> Zeros | None:
        return Zeros("qzeros", plus=0 if scheme.version == V2 else 1)


def gptq_parts(scheme: DeclaredScheme, rows: int, columns: int) -> Parts:
    """The stored tensors of a linear."""
    bits, groups = scheme.number.bits, -(-columns // (scheme.group_size or columns))
    return {
        "qweight": Part(("I32",), (-(-columns * bits // _WORD), rows)),
        "qzeros": Part(("I32",), (groups, -(-rows * bits // _WORD))),
        "scales": Part(FLOAT_DTYPES, (groups, rows)),
        "g_idx": Part(("I32",), (columns,), optional=not scheme.ordered),
    }
