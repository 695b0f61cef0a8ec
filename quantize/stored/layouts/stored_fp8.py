"""Plain `fp8`, as vLLM and SGLang read it: per matrix, or per 128 x 128 block."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from ....recipes.formats import NUMBER_FORMATS
from ....recipes.schema import Recipe, StoredLayoutName
from .declared_cache import STATIC, of_fp8
from .reader import ObjectReader, not_understood
from .scheme import (
    FLOAT_DTYPES,
    Activations,
    DeclaredScheme,
    OwnFormat,
    Part,
    Parts,
    StoredLayout,
    stored_codes,
)

_POWERS = "ue8m0"
"""Scales that are powers of two, in whatever dtype."""
_BLOCKS = ((128, 128), (64, 64), (1, 128), (128, 64), (64, 128))
(BLOCK,) = NUMBER_FORMATS["fp8_e4m3"].sizes["block"]


class StoredFp8(StoredLayout):
    """`weight`; `weight_scale` [] and `input_scale` [], or `weight_scale_inv` per block."""

    name: StoredLayoutName = "fp8"
    exclude_keys = ("ignored_layers", "modules_to_not_convert")
    companions = frozenset({"weight_scale", "weight_scale_inv", "input_scale"})

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        dynamic = keys.choice("activation_scheme", "dynamic", "static") == "dynamic"
        keys.optional("fmt", "e4m3", None)
        cache = of_fp8(keys)
        powers = keys.strictness != "engine" and keys.has("scale_fmt")
        if powers:
            keys.choice("scale_fmt", _POWERS)
        blocks = keys.has("weight_block_size")
        rows = columns = BLOCK
        if blocks:
            sizes = _BLOCKS[:1] if keys.strictness == "engine" else _BLOCKS
            rows, columns = keys.one_of_lists("weight_block_size", *sizes)
        whole: Activations = "token-dynamic" if dynamic else "tensor-static"
        of_blocks: Activations = "group-dynamic" if columns == BLOCK else "group-dynamic-64"
        return DeclaredScheme(
            layout=self,
            weight_dtype="fp8_e4m3",
            granularity="block" if blocks else "tensor",
            group_size=columns if blocks else None,
            pack_method=None,
            activations=of_blocks if blocks else whole,
            version=_POWERS if powers else None,
            block_rows=rows if rows != columns else None,
            kv_cache=cache,
        )

    @override
    def excludes(self, keys: ObjectReader) -> tuple[str, ...]:
        ignored, other = (keys.strings(key) for key in self.exclude_keys)
        excludes = ignored or other
        if other and set(other) != set(excludes):
            raise not_understood(
                keys.where,
                f"{keys.key}.modules_to_not_convert",
                (f"the same names as ignored_layers {sorted(excludes)}",),
                sorted(other),
            )
        return excludes

    @override
    def complete(
        self, recipe: Recipe, excludes: list[str], own: Sequence[OwnFormat] = ()
    ) -> dict[str, Any]:
        whole: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": "static" if recipe.needs_input_scales else "dynamic",
        }
        if recipe.weights.granularity == "block":
            whole |= {"fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
        if recipe.kv_cache is not None:
            whole["kv_cache_scheme"] = STATIC
        return whole | dict.fromkeys(self.exclude_keys, excludes)

    @override
    def excludes_module(self, pattern: str, module: str) -> bool:
        """The whole name."""
        return pattern == module

    @override
    def parts(
        self, scheme: DeclaredScheme, rows: int, columns: int, scale_dtypes: tuple[str, ...]
    ) -> Parts:
        size = scheme.group_size
        parts = {"weight": stored_codes(scheme, rows, columns)}
        if size:
            scales = (-(-rows // scheme.rows_of_scale), -(-columns // size))
            parts["weight_scale_inv"] = Part((*FLOAT_DTYPES, "F8_E8M0"), scales)
        else:
            parts["weight_scale"] = Part(("F32", "BF16"), (), or_shape=(1,))
        if scheme.activations == "tensor-static":
            parts["input_scale"] = Part(("F32", "BF16"), (), or_shape=(1,))
        return parts

    @override
    def scale_suffix(self, scheme: DeclaredScheme) -> str:
        # Despite its name it multiplies the codes
        return "weight_scale_inv" if scheme.granularity == "block" else "weight_scale"
