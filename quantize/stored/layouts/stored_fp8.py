"""Plain `fp8`, as vLLM and SGLang read it: per matrix, or per 128 x 128 block."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from ....recipes.formats import NUMBER_FORMATS
from ....recipes.schema import Recipe, StoredLayoutName
from .declared_cache import STATIC, of_fp8
from .reader import ObjectReader, not_understood
from .scheme import Activations, DeclaredScheme, OwnFormat, Part, Parts, StoredLayout, stored_codes

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
        blocks = keys.has("weight_block_size")
        if blocks:
            keys.numbers("weight_block_size", BLOCK, BLOCK)
        whole: Activations = "token-dynamic" if dynamic else "tensor-static"
        return DeclaredScheme(
            layout=self,
            weight_dtype="fp8_e4m3",
            granularity="block" if blocks else "tensor",
            group_size=BLOCK if blocks else None,
            pack_method=None,
            activations="group-dynamic" if blocks else whole,
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
        scales = (-(-rows // size), -(-columns // size)) if size else ()
        parts = {
            "weight": stored_codes(scheme, rows, columns),
            self.scale_suffix(scheme): Part(("F32",), scales),
        }
        if scheme.activations == "tensor-static":
            parts["input_scale"] = Part(("F32", "BF16"), ())
        return parts

    @override
    def scale_suffix(self, scheme: DeclaredScheme) -> str:
        # Despite its name it multiplies the codes
        return "weight_scale_inv" if scheme.granularity == "block" else "weight_scale"
