"""compressed-tensors 0.20, `QuantizationConfig`; groups of linears, one for all other linears."""

import dataclasses
from typing import Any

from typing_extensions import override

from ....recipes.formats import (
    FP8_CACHE,
    NUMBER_FORMATS,
    Granularity,
    KvCacheDtype,
    NumberFormat,
    WeightDtype,
)
from ....recipes.schema import ActivationFormat, Recipe, StoredLayoutName
from .declaration_reader import SPEC_NO_MEANING, ObjectReader
from .integer_layouts import SIZES
from .scheme import (
    EVERY_LINEAR,
    Activations,
    DeclaredScheme,
    Others,
    Part,
    Parts,
    StoredLayout,
    group_count,
    stored_codes,
)

_FORMATS: dict[str, WeightDtype] = {
    "pack-quantized": "int4",  # or "int8", by num_bits
    "float-quantized": "fp8_e4m3",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
}
_FORMAT_OF = {dtype: form for form, dtype in _FORMATS.items()} | {"int8": "pack-quantized"}
_MIXED = "mixed-precision"
"""The format of a declaration whose groups have several."""
_MOST_GROUPS = 16
_CACHE = "kv_cache_scheme"
_PER_HEAD = "attn_head"
_SCALE_DTYPES: dict[WeightDtype, str] = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8"}
(BLOCK,) = NUMBER_FORMATS["fp8_e4m3"].sizes["block"]

_IN_PLACE = (None, False, "weight", "static")
"""Values of `actorder` for weights: GPTQ's order of columns, whose groups stay neighbours
(`ActivationOrdering` of compressed-tensors 0.20). "group" and "dynamic" store an order."""


class StoredCompressedTensors(StoredLayout):
    """`weight` (FP8) or `weight_packed`; `weight_scale` [out, groups], [1] for a whole matrix.

    INT4 adds `weight_shape`; NVFP4 `weight_global_scale` and `input_global_scale`, which divide.
    """

    name: StoredLayoutName = "compressed-tensors"
    exclude_keys = ("ignore",)
    companions = frozenset({
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
        "weight_global_scale", "input_scale", "input_global_scale",
    })  # fmt: skip
    unsigned = True
    signed_scales = True
    names_heads = True

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        form = keys.choice("format", *_FORMATS, _MIXED)
        keys.optional("quantization_status", "compressed")
        keys.absent("sparsity_config", "moe_sparsity_config", "transform_config")
        cache, per_head = _cache(keys)
        groups = _groups(keys) if form == _MIXED or _has_names(keys) else [only_group(keys)]
        several = len(groups) > 1
        first, *others = (self._scheme(group, form, several=several) for group in groups)
        return dataclasses.replace(
            first, others=tuple(others), kv_cache=cache, cache_per_head=per_head
        )

    def _scheme(self, group: ObjectReader, usual: str, *, several: bool) -> DeclaredScheme:
        """The scheme of one group; `usual` is the format of a group that names none.

        With several groups each may have another format than the whole declaration: engines read a
        group's first, and SGLang reads some keys only from the whole.
        """
        form = usual
        if usual == _MIXED or group.has("format"):
            form = group.choice("format", *(_FORMATS if usual == _MIXED or several else (usual,)))
        group.absent("output_activations")
        dtype, weights = _FORMATS[form], group.section("weights", SPEC_NO_MEANING)
        if dtype == "int4" and weights.says("num_bits", 8):
            dtype = "int8"
        granularity, group_size = _weights(weights, dtype)
        activations: Activations = "none"
        if group.has("input_activations"):
            inputs = group.section("input_activations", ignored=SPEC_NO_MEANING)
            activations = _inputs(inputs, dtype, granularity)
        targets = group.strings("targets")
        group.finish()
        return DeclaredScheme(
            layout=self, weight_dtype=dtype, granularity=granularity, group_size=group_size,
            pack_method="order" if NUMBER_FORMATS[dtype].is_integer else None,
            activations=activations, targets=targets,
        )  # fmt: skip

    @override
    def declaration(self, recipe: Recipe, excludes: list[str], rest: Others = ()) -> dict[str, Any]:
        # Both engines look for the name of a linear first, in the order of the groups, then for its
        # class, so `Linear` means every other one. A head is found only by its name: its class,
        # ParallelLMHead, has no "Linear" in it
        groups = {"group_0": _declared_group(recipe, ["Linear"])}
        for index, each in enumerate(rest, start=1):
            targets = [f"re:.*{leaf}$" for leaf in each.leaves]
            groups[f"group_{index}"] = _declared_group(each.recipe, targets)
        forms = {group["format"] for group in groups.values()}
        cache = recipe.kv_cache and _declared_args(
            NUMBER_FORMATS[recipe.kv_cache.dtype], "tensor", dynamic=False
        )
        return {
            "config_groups": groups,
            "format": forms.pop() if len(forms) == 1 else _MIXED,
            "global_compression_ratio": None,
            "ignore": excludes,
            "kv_cache_scheme": cache,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }

    @override
    def parts(self, scheme: DeclaredScheme, rows: int, columns: int) -> Parts:
        number, size = scheme.number, scheme.group_size or columns
        shapes = {"tensor": (1,), "block": (-(-rows // size), -(-columns // size))}
        scales = shapes.get(scheme.granularity, (rows, group_count(scheme, columns)))
        dtypes = {None: (), "F32": ("F32", "BF16")}.get(number.scale_dtype)
        parts = {self.weight_suffix(scheme): stored_codes(scheme, rows, columns)}
        if number.is_integer:
            parts["weight_shape"] = Part(("I64",), (2,))
        scale_dtypes = (str(number.scale_dtype),) if dtypes is None else dtypes
        parts["weight_scale"] = Part(scale_dtypes, scales)
        if number.global_scale:
            parts["weight_global_scale"] = Part(("F32",), (1,))
        if scheme.activations == "tensor-static":
            parts["input_scale"] = Part(("F32", "BF16"), (1,))
        elif scheme.activations == "nvfp4":
            parts["input_global_scale"] = Part(("F32",), (1,))
        return parts

    @override
    def weight_suffix(self, scheme: DeclaredScheme) -> str:
        packed = scheme.number.codes_per_element > 1
        return "weight_packed" if packed else "weight"

    @override
    def foreign_quotients_rounded(self, scheme: DeclaredScheme) -> bool:
        # The library itself does so
        return True


def _declared_group(recipe: Recipe, targets: list[str]) -> dict[str, Any]:
    weights, size = recipe.weights, recipe.weights.group_size
    structure: dict[str, Any] = {}
    if weights.granularity == "block":
        structure, size = {"block_structure": [size, size]}, None
    args = _declared_args(weights.number, weights.granularity, dynamic=False, group_size=size)
    return {
        "format": _FORMAT_OF[weights.dtype],
        "input_activations": _declared_inputs(recipe.activations),
        "output_activations": None,
        "targets": targets,
        "weights": structure | args,
    }


def _declared_inputs(activations: ActivationFormat | None) -> dict[str, Any] | None:
    if activations is None:
        return None
    number, size = NUMBER_FORMATS[activations.dtype], None
    if activations.granularity == "group":  # FP8: one side of a block
        (size,) = number.sizes["group" if number.only_groups else "block"]
    dynamic = "local" if number.global_scale else activations.dynamic
    return _declared_args(number, activations.granularity, dynamic=dynamic, group_size=size)


def _declared_args(
    number: NumberFormat, strategy: str, *, dynamic: bool | str, group_size: int | None = None
) -> dict[str, Any]:
    return {
        "dynamic": dynamic,
        "group_size": group_size,
        "num_bits": number.bits,
        "strategy": "tensor_group" if number.global_scale else strategy,
        "symmetric": True,
        "type": number.kind,
    }


def _weights(weights: ObjectReader, dtype: WeightDtype) -> tuple[Granularity, int | None]:
    number = NUMBER_FORMATS[dtype]
    group = "tensor_group" if number.global_scale else "group"  # under one scale of the matrix
    strategies = {group if g == "group" else g: g for g in number.sizes}
    granularity = strategies[weights.choice("strategy", *strategies)]
    size = None
    if granularity == "group":
        as_engines = weights.strictness == "engine" or not number.is_integer
        size = weights.choice("group_size", *(number.sizes["group"] if as_engines else SIZES))
        weights.absent("block_structure")
    elif granularity == "block":
        weights.absent("group_size")
        weights.one_of_lists("block_structure", (BLOCK, BLOCK))
        size = BLOCK
    else:
        weights.absent("group_size", "block_structure")
    _args(weights, number, _SCALE_DTYPES.get(dtype))
    weights.optional("actorder", *_IN_PLACE)
    weights.absent("dynamic")
    weights.finish()
    return granularity, size


def _cache(keys: ObjectReader) -> tuple[KvCacheDtype | None, bool]:
    """`kv_cache_scheme`, a `QuantizationArgs`: its format, and whether each head has a scale."""
    if not keys.has(_CACHE):
        return None, False
    args = keys.section(_CACHE, ignored=SPEC_NO_MEANING)
    cache_numbers(args)
    args.choice("symmetric", True)
    per_head = args.choice("strategy", "tensor", _PER_HEAD) == _PER_HEAD
    args.absent("group_size", "block_structure", "actorder", "zp_dtype", "scale_dtype")
    args.finish()
    return FP8_CACHE, per_head


def cache_numbers(args: ObjectReader) -> None:
    """The numbers of an FP8 cache, as two layouts declare them."""
    number = NUMBER_FORMATS[FP8_CACHE]
    args.exactly(num_bits=number.bits, type=number.kind, dynamic=False)


def only_group(keys: ObjectReader) -> ObjectReader:
    """The one entry of `config_groups`, which must target every Linear.

    Its name means nothing: llm-compressor 0.14 writes the preset's, such as FP8_DYNAMIC.
    """
    groups = keys.section("config_groups")
    names = groups.names()
    group = groups.section(names[0] if len(names) == 1 else "group_0")
    groups.finish()
    if group.strings("targets") != ("Linear",):
        raise group.refused("targets", ("['Linear']",), list(group.strings("targets")))
    return group


def _has_names(keys: ObjectReader) -> bool:
    """True for several groups, or one that also names modules, a head, or patterns."""
    groups = keys.section("config_groups")
    names = groups.names()
    if len(names) != 1:
        return len(names) > 1
    targets = groups.section(names[0]).strings("targets")
    patterns = bool(targets) and all(target.startswith("re:") for target in targets)
    return patterns or (len(targets) > 1 and set(EVERY_LINEAR) < set(targets))


def _groups(keys: ObjectReader) -> list[ObjectReader]:
    groups = keys.section("config_groups")
    names = groups.names()
    if not 1 <= len(names) <= _MOST_GROUPS:
        raise keys.refused("config_groups", (f"1 to {_MOST_GROUPS} groups",), list(names))
    sections = [groups.section(name) for name in names]
    for group in sections:
        if not group.strings("targets"):
            raise group.refused("targets", ("a list of names",), None)
    return sections


def _inputs(inputs: ObjectReader, dtype: WeightDtype, granularity: Granularity) -> Activations:
    """NVFP4 has groups of 16 under a stored scale; blocks have groups of 128, one side of a block.

    Engines compute that for blocks, whatever is declared.
    """
    nvfp4 = NUMBER_FORMATS[dtype].global_scale
    rounded: WeightDtype = "nvfp4" if nvfp4 else "fp8_e4m3"
    _args(inputs, NUMBER_FORMATS[rounded], _SCALE_DTYPES.get(rounded))
    inputs.absent("actorder", "block_structure")
    activations: Activations
    if nvfp4:
        inputs.choice("strategy", "tensor_group")
        inputs.choice("group_size", *NUMBER_FORMATS["nvfp4"].sizes["group"])
        inputs.choice("dynamic", "local")
        activations = "nvfp4"
    elif granularity == "block":
        inputs.exactly(strategy="group", group_size=BLOCK, dynamic=True)
        activations = "group-dynamic"
    else:
        inputs.absent("group_size")
        token = inputs.choice("strategy", "token", "tensor") == "token"
        inputs.choice("dynamic", token)
        activations = "token-dynamic" if token else "tensor-static"
    inputs.finish()
    return activations


def _args(args: ObjectReader, number: NumberFormat, scale_dtype: str | None) -> None:
    """`scale_dtype` is the dtype that scales of this format have, which some tools declare too."""
    args.exactly(num_bits=number.bits, type=number.kind, symmetric=True)
    args.absent("zp_dtype")
    args.optional("scale_dtype", None, *([scale_dtype] if scale_dtype else []))
