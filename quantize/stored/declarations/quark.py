"""AMD Quark 0.13, `real_quantized` export; see its `ModelQuantizer` and `export_safetensors`."""

from typing import Literal

from .reader import ObjectReader, not_understood
from .scheme import (
    PACK_METHODS,
    SPEC_NO_MEANING,
    Activations,
    DeclaredScheme,
    Granularity,
    PackMethod,
    WeightDtype,
)

_WEIGHT_DTYPES: dict[str, WeightDtype] = {"int4": "int4", "fp8_e4m3": "fp8_e4m3", "fp4": "mxfp4"}
_GRANULARITIES: dict[str, Granularity] = {
    "per_channel": "channel",
    "per_tensor": "tensor",
    "per_group": "group",
}
_UNUSED = ("block_size", "is_scale_quant", "mx_element_dtype")
_UNUSED_WITHOUT_MX = ("scale_calculation_mode", "scale_format")
_GROUP_SIZES = (32, 64, 128)


def read(keys: ObjectReader) -> DeclaredScheme:
    """Read a `quantization_config` with quant_method "quark".

    Raises:
        VerifyError: it says something that is not understood.
    """
    keys.absent(
        "algo_config",
        "kv_cache_quant_config",
        "layer_quant_config",
        "layer_type_quant_config",
        "softmax_quant_spec",
        "kv_cache_post_rope",
    )
    export = keys.section("export", ignored={"min_kv_scale"})
    pack_method: PackMethod = export.choice("pack_method", *PACK_METHODS)
    export.choice("weight_format", "real_quantized")
    export.absent("kv_cache_group", "weight_merge_groups")
    export.finish()
    section = keys.section("global_quant_config", ignored={"target_device"})
    section.absent("bias", "output_tensors")
    stages = section.sections("weight", ignored=SPEC_NO_MEANING)
    dtype, granularity, group_size = _weight(stages[-1])
    first_stage = _first_stage(stages, dtype, granularity)
    activations: Activations = "none"
    if section.has("input_tensors"):
        activations = _inputs(section.section("input_tensors", ignored=SPEC_NO_MEANING))
    section.finish()
    return DeclaredScheme(
        layout="quark",
        weight_dtype=dtype,
        granularity=granularity,
        group_size=group_size,
        first_stage=first_stage,
        pack_method=pack_method if dtype == "int4" else None,
        activations=activations,
        excludes=keys.strings("exclude"),
    )


def _weight(spec: ObjectReader) -> tuple[WeightDtype, Granularity, int | None]:
    dtype = _WEIGHT_DTYPES[spec.choice("dtype", *_WEIGHT_DTYPES)]
    spec.absent("is_dynamic")
    if dtype == "mxfp4":
        _mx(spec)
        return dtype, "group", 32
    if dtype == "int4":
        scheme = spec.choice("qscheme", "per_channel", "per_group")
        spec.choice("symmetric", True)
        spec.optional("zero_point_type", "int32", None)
    else:
        scheme = spec.choice("qscheme", "per_channel", "per_tensor")
        spec.optional("symmetric", True, None)
        spec.optional("zero_point_type", "int32", "float32", None)
    size = None
    if scheme == "per_group":
        size = spec.choice("group_size", *_GROUP_SIZES)
        spec.optional("ch_axis", 1, -1, 0)  # Quark's helpers differ; groups run along the inputs
    else:
        spec.optional("ch_axis", *((0,) if scheme == "per_channel" else (None,)))
        spec.absent("group_size")
    spec.absent(*_UNUSED, *_UNUSED_WITHOUT_MX)
    spec.finish()
    return dtype, _GRANULARITIES[scheme], size


def _first_stage(
    stages: list[ObjectReader], dtype: WeightDtype, granularity: Granularity
) -> Literal["fp8_e4m3"] | None:
    """Quark's `ProgressiveSpec`: FP8 per tensor first, then INT4 per channel."""
    if len(stages) == 1:
        return None
    second = f"{dtype} per {granularity}"
    if len(stages) != 2 or second != "int4 per channel":
        got = f"{len(stages)} stages, the last one {second}"
        raise not_understood(stages[-1].where, stages[-1].key, ("int4 per channel, of two",), got)
    first = stages[0]
    first.choice("dtype", "fp8_e4m3")
    first.choice("qscheme", "per_tensor")
    _weight(first)
    return "fp8_e4m3"


def _inputs(spec: ObjectReader) -> Activations:
    if spec.choice("dtype", "fp8_e4m3", "fp4") == "fp4":
        spec.choice("is_dynamic", True)
        _mx(spec)
        return "mxfp4"
    spec.optional("symmetric", True, None)
    spec.optional("zero_point_type", "int32", "float32", None)
    scheme = spec.choice("qscheme", "per_channel", "per_tensor")
    dynamic = spec.choice("is_dynamic", True, *((False,) if scheme == "per_tensor" else ()))
    # Quark spells "per token" as per_channel along the axis of tokens.
    spec.optional("ch_axis", *((1,) if scheme == "per_channel" else (None,)))
    spec.absent("group_size", *_UNUSED, *_UNUSED_WITHOUT_MX)
    spec.finish()
    if scheme == "per_channel":
        return "token-dynamic"
    return "tensor-dynamic" if dynamic else "tensor-static"


def _mx(spec: ObjectReader) -> None:
    """OCP MXFP4: 32 inputs under one power of two."""
    spec.choice("qscheme", "per_group")
    spec.choice("group_size", 32)
    spec.choice("scale_format", "e8m0")
    spec.optional("scale_calculation_mode", "even", "floor", "ceil", None)  # how it was chosen
    spec.optional("ch_axis", -1, 1)
    spec.optional("symmetric", None, True)
    spec.optional("zero_point_type", "int32", "float32", None)
    spec.absent(*_UNUSED)
    spec.finish()
