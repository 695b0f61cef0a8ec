"""AMD Quark 0.13, `real_quantized` export; see its `ModelQuantizer` and `export_safetensors`."""

import fnmatch
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from typing_extensions import override

from ....recipes.formats import FP8_CACHE, NUMBER_FORMATS, Granularity, KvCacheDtype, WeightDtype
from ....recipes.schema import ActivationFormat, Recipe, StoredLayoutName, WeightFormat
from .declaration_reader import SPEC_NO_MEANING, ObjectReader, not_understood
from .module_patterns import is_regex_match
from .scheme import (
    FLOAT_DTYPES,
    PACK_METHODS,
    Activations,
    DeclaredScheme,
    Others,
    PackMethod,
    Part,
    Parts,
    StoredLayout,
    group_count,
    stored_codes,
    words,
)

_WEIGHT_DTYPES: dict[str, WeightDtype] = {"int4": "int4", "fp8_e4m3": "fp8_e4m3", "fp4": "mxfp4"}
_GRANULARITIES: dict[str, Granularity] = {
    "per_channel": "channel",
    "per_tensor": "tensor",
    "per_group": "group",
}
_UNUSED = ("block_size", "is_scale_quant", "mx_element_dtype")
_UNUSED_WITHOUT_MX = ("scale_calculation_mode", "scale_format")
_CACHED_LINEARS = ("*k_proj", "*v_proj")
"""Linears whose outputs go into the KV cache, as Quark's `LLMTemplate` names them."""
(MX_GROUP,) = NUMBER_FORMATS["mxfp4"].sizes["group"]


class StoredQuark(StoredLayout):
    """`weight` and `weight_scale`, for INT4 also an all-zero `weight_zero_point`.

    With two stages `weight_scale` [] is the first one's, `_2` the second one's. INT4 groups are
    transposed. From file to file Quark stores INT4 scales in F32, and may declare another order of
    nibbles than it packs in.
    """

    name: StoredLayoutName = "quark"
    exclude_keys = ("exclude",)
    companions = frozenset({
        "weight_scale", "weight_scale_2", "weight_zero_point", "weight_zero_point_2",
        "input_scale",
    })  # fmt: skip
    zero_points = MappingProxyType({"weight_zero_point": 0x00, "weight_zero_point_2": 0x00})
    foreign_scale_dtypes = ("F32",)

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        keys.absent(
            "algo_config", "layer_type_quant_config", "softmax_quant_spec", "kv_cache_post_rope"
        )
        export = keys.section("export", ignored={"min_kv_scale"})
        pack_method: PackMethod = export.choice("pack_method", *PACK_METHODS)
        export.choice("weight_format", "real_quantized")
        export.absent("weight_merge_groups")
        cache = _cache(keys, export)
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
            layout=self, weight_dtype=dtype, granularity=granularity, group_size=group_size,
            first_stage=first_stage, pack_method=pack_method if dtype == "int4" else None,
            activations=activations, kv_cache=cache,
        )  # fmt: skip

    @override
    def declaration(self, recipe: Recipe, excludes: list[str], rest: Others = ()) -> dict[str, Any]:
        linear = {
            "bias": None,
            "input_tensors": _activation_spec(recipe.activations),
            "output_tensors": None,
            "target_device": None,
            "weight": _weight_spec(recipe.weights),
        }
        cached: dict[str, Any] = {}
        if recipe.kv_cache is not None:  # the outputs of these linears, rounded under one scale
            spec = _spec(recipe.kv_cache.dtype, "tensor", axis=None, dynamic=False)
            cached = {name: {**linear, "output_tensors": spec} for name in _CACHED_LINEARS}
        return {
            "algo_config": None,
            "exclude": excludes,
            "export": {
                "kv_cache_group": list(cached),
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": linear,
            "kv_cache_post_rope": False,
            "kv_cache_quant_config": cached,
            "layer_quant_config": cached,
            "layer_type_quant_config": {},
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": "0.13",
        }

    @override
    def excludes_module(self, pattern: str, module: str) -> bool:
        """`re:` matches from the start; other patterns are shell wildcards."""
        if pattern.startswith("re:"):
            return is_regex_match(pattern, module)
        return fnmatch.fnmatchcase(module, pattern)

    @override
    def parts(self, scheme: DeclaredScheme, rows: int, columns: int) -> Parts:
        codes, groups = stored_codes(scheme, rows, columns), group_count(scheme, columns)
        scales: tuple[int, ...] = () if scheme.granularity == "tensor" else (rows,)
        parts = {"weight": codes}
        if self.transposed(scheme):
            parts["weight"] = Part(("I32",), (columns, words(rows)))
            parts["weight_zero_point"] = Part(("I32",), (groups, words(rows)))
            parts["weight_scale"] = Part((), (groups, rows))
        elif scheme.first_stage:
            parts["weight_zero_point_2"] = Part(("I32",), (words(rows),))
            parts["weight_scale"] = Part(("F32", "BF16"), ())
            parts["weight_scale_2"] = Part(FLOAT_DTYPES, scales)
        elif scheme.number.is_integer:
            parts["weight_zero_point"] = Part(("I32",), (words(rows),))
            parts["weight_scale"] = Part((), scales)
        elif scheme.number.powers_of_two:
            parts["weight_scale"] = Part(("U8",), (rows, groups))
        else:
            parts["weight_scale"] = Part(("F32", "BF16"), scales)
        if scheme.activations == "tensor-static":
            parts["input_scale"] = Part(("F32", "BF16"), ())
        return parts

    @override
    def scale_suffix(self, scheme: DeclaredScheme) -> str:
        return "weight_scale_2" if scheme.first_stage else "weight_scale"

    @override
    def transposed(self, scheme: DeclaredScheme) -> bool:
        return scheme.number.is_integer and scheme.granularity == "group"

    @override
    def foreign_quotients_rounded(self, scheme: DeclaredScheme) -> bool:
        # So are the FP8 values of two stages
        return scheme.first_stage is not None


def _weight_spec(weights: WeightFormat) -> dict[str, Any] | list[dict[str, Any]]:
    if weights.number.powers_of_two:
        return _mx_spec(dynamic=False)
    axis = None if weights.granularity == "tensor" else 0
    spec = _spec(weights.dtype, weights.granularity, axis=axis, dynamic=False)
    if weights.first_stage:  # a list of stages, both with float32 scales
        return [_spec(weights.first_stage, "tensor", axis=None, dynamic=False), spec]
    if weights.number.is_integer:
        spec |= {"group_size": weights.group_size, "scale_type": weights.scale_dtype or "float"}
    return spec


def _activation_spec(activations: ActivationFormat | None) -> dict[str, Any] | None:
    if activations is None:
        return None
    if activations.dtype == "mxfp4":
        return _mx_spec(dynamic=True)
    # Quark spells "per token" as per_channel along the axis of tokens.
    token = activations.granularity == "token"
    granularity, axis = ("channel", 1) if token else ("tensor", None)
    return _spec("fp8_e4m3", granularity, axis=axis, dynamic=activations.dynamic)


def _mx_spec(*, dynamic: bool) -> dict[str, Any]:
    return _spec("fp4", "group", axis=-1, dynamic=dynamic) | {
        "group_size": MX_GROUP,
        "observer_cls": "PerBlockMXObserver",
        "scale_calculation_mode": "even",
        "scale_format": "e8m0",
        "scale_type": "float",
        "symmetric": None,
    }


def _spec(dtype: str, granularity: str, *, axis: int | None, dynamic: bool) -> dict[str, Any]:
    """One QTensorConfig of Quark 0.13; `axis` None means one scale for the tensor."""
    return {
        "block_size": None,
        "ch_axis": axis,
        "dtype": dtype,
        "enable_buffer_reuse": False,
        "group_size": None,
        "is_dynamic": dynamic,
        "is_scale_quant": False,
        "max_input_numel": 4194304,
        "mx_element_dtype": None,
        "observer_cls": f"Per{granularity.capitalize()}MinMaxObserver",
        "qscheme": f"per_{granularity}",
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": None,
        "scale_type": "float32",
        "symmetric": True,
        "zero_point_type": "int32",
    }


def _cache(keys: ObjectReader, export: ObjectReader) -> KvCacheDtype | None:
    """`export.kv_cache_group`, and two more tables on the rounding of the linears that it names.

    They are quantized like all others, and their outputs under one scale.
    """
    group = export.strings("kv_cache_group")
    if not group:
        keys.absent("kv_cache_quant_config", "layer_quant_config")
        return None
    if group != _CACHED_LINEARS:
        raise export.refused("kv_cache_group", (f"{list(_CACHED_LINEARS)}",), list(group))
    others = keys.plain("global_quant_config")
    for table in ("kv_cache_quant_config", "layer_quant_config"):
        section = keys.section(table)
        for name in _CACHED_LINEARS:
            linear = section.section(name, ignored={"target_device"})
            spec = linear.section("output_tensors", ignored=SPEC_NO_MEANING)
            spec.exactly(dtype=FP8_CACHE, qscheme="per_tensor", is_dynamic=False)
            spec.optional("symmetric", True, None)
            spec.optional("zero_point_type", "int32", "float32", None)
            spec.absent("ch_axis", "group_size", "block_size", "is_scale_quant")
            spec.absent("mx_element_dtype", "scale_calculation_mode", "scale_format")
            spec.finish()
            _check_same(linear, others)
        section.finish()
    return FP8_CACHE


def _check_same(linear: ObjectReader, others: Mapping[str, Any]) -> None:
    for key in ("weight", "input_tensors", "bias"):
        if linear.as_it_is(key) != others.get(key):
            wanted = (f"that of global_quant_config.{key}",)
            raise linear.refused(key, wanted, linear.as_it_is(key))
    linear.finish()


def _weight(spec: ObjectReader) -> tuple[WeightDtype, Granularity, int | None]:
    dtype = _WEIGHT_DTYPES[spec.choice("dtype", *_WEIGHT_DTYPES)]
    spec.absent("is_dynamic")
    if dtype == "mxfp4":
        _mx(spec)
        return dtype, "group", MX_GROUP
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
        size = spec.choice("group_size", *NUMBER_FORMATS[dtype].sizes["group"])
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
    if len(stages) != 2 or granularity not in NUMBER_FORMATS[dtype].second_stage:
        got = f"{len(stages)} stages, the last one {second}"
        raise not_understood(stages[-1].where, stages[-1].key, ("int4 per channel, of two",), got)
    first = stages[0]
    first.exactly(dtype="fp8_e4m3", qscheme="per_tensor")
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
    spec.exactly(qscheme="per_group", group_size=MX_GROUP, scale_format="e8m0")
    spec.optional("scale_calculation_mode", "even", "floor", "ceil", None)  # how it was chosen
    spec.optional("ch_axis", -1, 1)
    spec.optional("symmetric", None, True)
    spec.optional("zero_point_type", "int32", "float32", None)
    spec.absent(*_UNUSED)
    spec.finish()
