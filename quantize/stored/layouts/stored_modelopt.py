"""NVIDIA ModelOpt 0.47 (FP8 per tensor, or per channel and token; NVFP4), and plain `fp8`."""

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from ....recipes.formats import FP8_CACHE, NUMBER_FORMATS, Granularity, KvCacheDtype, WeightDtype
from ....recipes.regular_file import check_own
from ....recipes.schema import Recipe, StoredLayoutName
from ...files.checkpoint import CONFIG_FILE, read_json_object
from .declaration_reader import SPEC_NO_MEANING, ObjectReader
from .scheme import (
    FLOAT_DTYPES,
    Activations,
    DeclaredScheme,
    Others,
    Part,
    Parts,
    SideFile,
    StoredLayout,
    declared_activations,
    group_count,
    stored_codes,
)
from .stored_compressed_tensors import cache_numbers, only_group

HF_QUANT_CONFIG = "hf_quant_config.json"
_ALGORITHMS: dict[str, tuple[WeightDtype, Granularity, Activations]] = {
    "FP8": ("fp8_e4m3", "tensor", "tensor-static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3", "channel", "token-dynamic"),
    "NVFP4": ("nvfp4", "group", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", "group", "none"),
}
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # whose JSON this is
_FP8_CACHE = "FP8"
_CACHE = "kv_cache_scheme"
_STATIC_CACHE = "static"
"""AutoFP8's declaration of a cache with stored scales; engines use their command line's."""
_POWERS = "ue8m0"
"""Scales that are powers of two, in any dtype."""
_BLOCKS = ((128, 128), (64, 64), (1, 128), (128, 64), (64, 128))
(BLOCK,) = NUMBER_FORMATS["fp8_e4m3"].sizes["block"]


def algorithm_of(recipe: Recipe) -> str | None:
    """ModelOpt's name for a recipe's pair of formats, None where it has none."""
    weights, activations = recipe.weights, declared_activations(recipe.activations)
    formats = weights.dtype, weights.granularity, activations
    return next((name for name, known in _ALGORITHMS.items() if known == formats), None)


def _check_same(folder: Path, scheme: DeclaredScheme, declared: Mapping[str, Any]) -> None:
    """The nested form beside config.json, which TensorRT-LLM reads, must say the same."""
    path = folder / HF_QUANT_CONFIG
    check_own(folder, HF_QUANT_CONFIG)
    if not path.exists():
        return
    content: Mapping[str, Any] = read_json_object(path, "write it again from config.json")
    outer = ObjectReader(content, path, "", ignored={"producer", "version"})
    keys = outer.section("quantization")
    outer.finish()
    keys.choice("quant_algo", str(declared["quant_algo"]))
    if scheme.kv_cache is None:
        keys.absent("kv_cache_quant_algo")
    else:
        keys.choice("kv_cache_quant_algo", _FP8_CACHE)
    if scheme.group_size is not None:
        keys.optional("group_size", scheme.group_size)
    excluded = keys.strings("exclude_modules")
    if set(excluded) != set(scheme.excludes):
        wanted = (f"{sorted(scheme.excludes)} as in {CONFIG_FILE}",)
        raise keys.refused("exclude_modules", wanted, sorted(excluded))
    keys.finish()


def _side_file(declared: Mapping[str, Any]) -> dict[str, Any]:
    quantization = {
        "quant_algo": declared["quant_algo"],
        "kv_cache_quant_algo": _FP8_CACHE if _CACHE in declared else None,
        "exclude_modules": declared["exclude_modules"],
    }
    if "group_size" in declared:
        quantization["group_size"] = declared["group_size"]
    return {"producer": _PRODUCER, "quantization": quantization}


class StoredModelOpt(StoredLayout):
    """`weight` and `weight_scale`, for NVFP4 `weight_scale_2` [] too; a static `input_scale` []."""

    name: StoredLayoutName = "modelopt"
    exclude_keys = ("exclude_modules", "ignore")
    heads_are_linears = True
    companions = frozenset({"weight_scale", "weight_scale_2", "input_scale"})
    side_file = SideFile(HF_QUANT_CONFIG, "ModelOpt's own declaration", _check_same, _side_file)

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        # The nested form, flattened
        algo = keys.choice("quant_algo", *_ALGORITHMS)
        cache = _modelopt_cache(keys)
        dtype, granularity, activations = _ALGORITHMS[algo]
        group_size = next(iter(NUMBER_FORMATS[dtype].sizes[granularity]), None)
        if group_size is not None:
            keys.optional("group_size", group_size)
        else:
            keys.absent("group_size")
        if keys.has("config_groups") and keys.plain("config_groups") != {}:
            group = only_group(keys)
            # Weight-only under NVFP4's name: what an engine does with it is the engine's matter.
            if keys.strictness != "engine" and not group.has("input_activations"):
                activations = "none" if algo == "NVFP4" else activations
            _check_group(group, granularity, group_size)
        return DeclaredScheme(
            layout=self, weight_dtype=dtype, granularity=granularity, group_size=group_size,
            activations=activations, kv_cache=cache,
        )  # fmt: skip

    @override
    def excludes(self, keys: ObjectReader) -> tuple[str, ...]:
        excludes = keys.strings("exclude_modules" if keys.has("exclude_modules") else "ignore")
        # Engines read one list or the other: they must not exclude different modules.
        keys.same_strings("ignore", "exclude_modules", "patterns", excludes)
        return excludes

    @override
    def declaration(self, recipe: Recipe, excludes: list[str], rest: Others = ()) -> dict[str, Any]:
        algorithm = algorithm_of(recipe) or ""
        declared: dict[str, Any] = {
            "exclude_modules": excludes,
            "ignore": excludes,
            "producer": _PRODUCER,
            "quant_algo": algorithm,
            "quant_method": "modelopt",
        }
        if algorithm != "FP8_PER_CHANNEL_PER_TOKEN":
            size = recipe.weights.group_size
            args: dict[str, Any] = {"dynamic": False, "num_bits": 4 if size else 8, "type": "float"}
            if size:
                args["group_size"] = declared["group_size"] = size
            group: dict[str, Any] = {"targets": ["Linear"], "weights": args}
            if recipe.activations is not None:
                group["input_activations"] = args
            declared = {"config_groups": {"group_0": group}, **declared}
        if recipe.kv_cache is not None:
            number = NUMBER_FORMATS[recipe.kv_cache.dtype]
            declared[_CACHE] = {"dynamic": False, "num_bits": number.bits, "type": number.kind}
        return declared

    @override
    def excludes_module(self, pattern: str, module: str) -> bool:
        """Patterns are shell wildcards."""
        return fnmatch.fnmatchcase(module, pattern)

    @override
    def parts(self, scheme: DeclaredScheme, rows: int, columns: int) -> Parts:
        per_row = (rows,) if scheme.granularity == "channel" else ()
        parts = {
            "weight": stored_codes(scheme, rows, columns),
            "weight_scale": Part(("F32",), per_row),
        }
        if scheme.number.global_scale:
            parts["weight_scale"] = Part(("F8_E4M3",), (rows, group_count(scheme, columns)))
            parts["weight_scale_2"] = Part(("F32",), ())
        if scheme.activations in ("tensor-static", "nvfp4"):
            parts["input_scale"] = Part(("F32",), ())
        return parts


def _modelopt_cache(keys: ObjectReader) -> KvCacheDtype | None:
    named = keys.has("kv_cache_quant_algo")
    if named:
        keys.choice("kv_cache_quant_algo", _FP8_CACHE)
    if not keys.has(_CACHE):
        return FP8_CACHE if named else None
    args = keys.section(_CACHE)
    cache_numbers(args)
    args.finish()
    return FP8_CACHE


def _check_group(group: ObjectReader, granularity: Granularity, group_size: int | None) -> None:
    for part in ("input_activations", "weights"):
        if not group.has(part):
            continue
        args = group.section(part, ignored=SPEC_NO_MEANING)
        args.exactly(num_bits=4 if group_size else 8, type="float")
        per_token = granularity == "channel" and part == "input_activations"
        args.optional("dynamic", per_token)
        if granularity == "channel":
            args.optional("strategy", "token" if per_token else "channel")
        else:
            args.optional("strategy", "tensor", None)
        if group_size:
            args.optional("group_size", group_size)
        args.finish()
    group.finish()


class StoredFp8(StoredLayout):
    """`weight`; `weight_scale` [] and `input_scale` [], or `weight_scale_inv` per block.

    As vLLM and SGLang read it; DeepSeek-V3 is published in blocks of 128 x 128.
    """

    name: StoredLayoutName = "fp8"
    exclude_keys = ("ignored_layers", "modules_to_not_convert")
    companions = frozenset({"weight_scale", "weight_scale_inv", "input_scale"})

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        dynamic = keys.choice("activation_scheme", "dynamic", "static") == "dynamic"
        keys.optional("fmt", "e4m3", None)
        cached = keys.has(_CACHE)
        if cached:
            keys.choice(_CACHE, _STATIC_CACHE)
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
            layout=self, weight_dtype="fp8_e4m3", granularity="block" if blocks else "tensor",
            group_size=columns if blocks else None, activations=of_blocks if blocks else whole,
            version=_POWERS if powers else None, block_rows=rows if rows != columns else None,
            kv_cache=FP8_CACHE if cached else None,
        )  # fmt: skip

    @override
    def excludes(self, keys: ObjectReader) -> tuple[str, ...]:
        ignored, other = (keys.strings(key) for key in self.exclude_keys)
        excludes = ignored or other
        if other and set(other) != set(excludes):
            wanted = (f"the same names as ignored_layers {sorted(excludes)}",)
            raise keys.refused("modules_to_not_convert", wanted, sorted(other))
        return excludes

    @override
    def declaration(self, recipe: Recipe, excludes: list[str], rest: Others = ()) -> dict[str, Any]:
        declared: dict[str, Any] = {
            "activation_scheme": "static" if recipe.needs_input_scales else "dynamic",
            "ignored_layers": excludes,
            "modules_to_not_convert": excludes,
            "quant_method": "fp8",
        }
        if recipe.kv_cache is not None:
            declared[_CACHE] = _STATIC_CACHE
        size = recipe.weights.group_size
        return declared | ({"fmt": "e4m3", "weight_block_size": [size, size]} if size else {})

    @override
    def excludes_module(self, pattern: str, module: str) -> bool:
        """A pattern is the whole name."""
        return pattern == module

    @override
    def parts(self, scheme: DeclaredScheme, rows: int, columns: int) -> Parts:
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
