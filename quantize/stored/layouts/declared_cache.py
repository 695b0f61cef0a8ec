"""What declarations say of the KV cache, each layout in its own way; all of them mean FP8.

One scale for the keys of a layer and one for its values, or in compressed-tensors one for each
key-value head, all stored. Nothing else is understood.
"""

from collections.abc import Mapping
from typing import Any

from ....recipes.formats import FP8_CACHE, NUMBER_FORMATS, KvCacheDtype
from .declaration_reader import SPEC_NO_MEANING, ObjectReader, not_understood

CACHED_LINEARS = ("*k_proj", "*v_proj")
"""As Quark names the linears whose outputs are cached."""
STATIC = "static"
"""What AutoFP8 says of a cache with stored scales."""
MODELOPT_FP8 = "FP8"
_NUMBER = NUMBER_FORMATS[FP8_CACHE]
_SCHEME = "kv_cache_scheme"
_PER_HEAD = "attn_head"


def of_compressed_tensors(keys: ObjectReader) -> tuple[KvCacheDtype | None, bool]:
    """`kv_cache_scheme`, a `QuantizationArgs`: its format, and whether each head has a scale."""
    if not keys.has(_SCHEME):
        return None, False
    args = keys.section(_SCHEME, ignored=SPEC_NO_MEANING)
    _numbers(args)
    args.choice("symmetric", True)
    per_head = args.choice("strategy", "tensor", _PER_HEAD) == _PER_HEAD
    args.absent("group_size", "block_structure", "actorder", "zp_dtype", "scale_dtype")
    args.finish()
    return FP8_CACHE, per_head


def of_modelopt(keys: ObjectReader) -> KvCacheDtype | None:
    """`kv_cache_scheme` of the flat form, `kv_cache_quant_algo` of the nested one."""
    named = keys.has("kv_cache_quant_algo")
    if named:
        keys.choice("kv_cache_quant_algo", MODELOPT_FP8)
    if not keys.has(_SCHEME):
        return FP8_CACHE if named else None
    args = keys.section(_SCHEME)
    _numbers(args)
    args.finish()
    return FP8_CACHE


def of_fp8(keys: ObjectReader) -> KvCacheDtype | None:
    """`kv_cache_scheme`, a word."""
    if not keys.has(_SCHEME):
        return None
    keys.choice(_SCHEME, STATIC)
    return FP8_CACHE


def of_quark(keys: ObjectReader, export: ObjectReader) -> KvCacheDtype | None:
    """`export.kv_cache_group`, and two more tables of what rounds the linears that it names.

    They are quantized as all others are, and their outputs under one scale.
    """
    group = export.strings("kv_cache_group")
    if not group:
        keys.absent("kv_cache_quant_config", "layer_quant_config")
        return None
    if group != CACHED_LINEARS:
        wanted = f"{list(CACHED_LINEARS)}"
        raise not_understood(export.where, f"{export.key}.kv_cache_group", (wanted,), list(group))
    others = keys.plain("global_quant_config")
    for table in ("kv_cache_quant_config", "layer_quant_config"):
        section = keys.section(table)
        for name in CACHED_LINEARS:
            linear = section.section(name, ignored={"target_device"})
            spec = linear.section("output_tensors", ignored=SPEC_NO_MEANING)
            spec.choice("dtype", FP8_CACHE)
            spec.choice("qscheme", "per_tensor")
            spec.choice("is_dynamic", False)
            spec.optional("symmetric", True, None)
            spec.optional("zero_point_type", "int32", "float32", None)
            spec.absent("ch_axis", "group_size", "block_size", "is_scale_quant")
            spec.absent("mx_element_dtype", "scale_calculation_mode", "scale_format")
            spec.finish()
            _same(linear, others)
        section.finish()
    return FP8_CACHE


def _same(linear: ObjectReader, others: Mapping[str, Any]) -> None:
    """What rounds weights and inputs is what rounds those of every other linear."""
    for key in ("weight", "input_tensors", "bias"):
        if linear.as_it_is(key) != others.get(key):
            wanted = (f"that of global_quant_config.{key}",)
            raise not_understood(linear.where, f"{linear.key}.{key}", wanted, linear.as_it_is(key))
    linear.finish()


def _numbers(args: ObjectReader) -> None:
    args.choice("num_bits", _NUMBER.bits)
    args.choice("type", _NUMBER.kind)
    args.choice("dynamic", False)


def complete_spec_of(dtype: KvCacheDtype) -> dict[str, Any]:
    """The numbers of a cache, as two layouts say them."""
    number = NUMBER_FORMATS[dtype]
    return {"num_bits": number.bits, "type": number.kind, "dynamic": False}
