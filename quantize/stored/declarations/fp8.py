"""Plain `fp8`, as vLLM and SGLang read it: per matrix, or per 128 x 128 block."""

from .reader import ObjectReader, not_understood
from .scheme import DeclaredScheme


def read(keys: ObjectReader) -> DeclaredScheme:
    """Read a `quantization_config` with quant_method "fp8".

    Raises:
        VerifyError: it says something that is not understood.
    """
    dynamic = keys.choice("activation_scheme", "dynamic", "static") == "dynamic"
    keys.optional("fmt", "e4m3", None)
    keys.absent("kv_cache_scheme")
    blocks = keys.has("weight_block_size")
    if blocks:
        keys.numbers("weight_block_size", 128, 128)
    excludes = keys.strings("ignored_layers") or keys.strings("modules_to_not_convert")
    other = keys.strings("modules_to_not_convert")
    if other and set(other) != set(excludes):
        raise not_understood(
            keys.where,
            f"{keys.key}.modules_to_not_convert",
            (f"the same names as ignored_layers {sorted(excludes)}",),
            sorted(other),
        )
    return DeclaredScheme(
        layout="fp8",
        weight_dtype="fp8_e4m3",
        granularity="block" if blocks else "tensor",
        group_size=128 if blocks else None,
        pack_method=None,
        activations="group-dynamic" if blocks else "token-dynamic" if dynamic else "tensor-static",
        excludes=excludes,
    )
