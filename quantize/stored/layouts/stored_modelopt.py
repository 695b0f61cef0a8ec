"""NVIDIA ModelOpt 0.47: FP8 per tensor and static, FP8 per channel and token, NVFP4."""

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from ....recipes.formats import NUMBER_FORMATS, Granularity, WeightDtype
from ....recipes.regular_file import check_own
from ....recipes.schema import Recipe, StoredLayoutName
from ...files.checkpoint import CONFIG_FILE, read_json_object
from .declaration_reader import SPEC_NO_MEANING, ObjectReader, not_understood
from .declared_cache import MODELOPT_FP8, STATIC, complete_spec_of, of_fp8, of_modelopt
from .scheme import (
    FLOAT_DTYPES,
    Activations,
    DeclaredScheme,
    OwnFormat,
    Part,
    Parts,
    SideFile,
    StoredLayout,
    group_count,
    stored_codes,
)
from .stored_compressed_tensors import only_group

HF_QUANT_CONFIG = "hf_quant_config.json"
_ALGORITHMS: dict[str, tuple[WeightDtype, Granularity, Activations]] = {
    "FP8": ("fp8_e4m3", "tensor", "tensor-static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3", "channel", "token-dynamic"),
    "NVFP4": ("nvfp4", "group", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", "group", "none"),
}


def _check_side_file(folder: Path, scheme: DeclaredScheme, declared: Mapping[str, Any]) -> None:
    """The nested form beside config.json, which TensorRT-LLM reads, says the same."""
    path = folder / HF_QUANT_CONFIG
    check_own(folder, HF_QUANT_CONFIG)
    if not path.exists():
        return
    content: Mapping[str, Any] = read_json_object(path, "write it again from config.json")
    outer = ObjectReader.of(content, path, "", ignored={"producer", "version"})
    keys = outer.section("quantization")
    outer.finish()
    keys.choice("quant_algo", str(declared["quant_algo"]))
    if scheme.kv_cache is None:
        keys.absent("kv_cache_quant_algo")
    else:
        keys.choice("kv_cache_quant_algo", MODELOPT_FP8)
    if scheme.group_size is not None:
        keys.optional("group_size", scheme.group_size)
    if set(keys.strings("exclude_modules")) != set(scheme.excludes):
        raise not_understood(
            path,
            "quantization.exclude_modules",
            (f"{sorted(scheme.excludes)} as in {CONFIG_FILE}",),
            sorted(keys.strings("exclude_modules")),
        )
    keys.finish()


_PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def _complete_side_file(declared: Mapping[str, Any]) -> dict[str, Any]:
    """All that this package has in the nested form."""
    quantization = {key: declared.get(key) for key in ("quant_algo", "exclude_modules")}
    quantization["kv_cache_quant_algo"] = MODELOPT_FP8 if "kv_cache_scheme" in declared else None
    if "group_size" in declared:
        quantization["group_size"] = declared["group_size"]
    return {"producer": _PRODUCER, "quantization": quantization}


class StoredModelOpt(StoredLayout):
    """`weight` and `weight_scale`, for NVFP4 `weight_scale_2` [] too; a static `input_scale` []."""

    name: StoredLayoutName = "modelopt"
    exclude_keys = ("exclude_modules", "ignore")
    heads_are_linears = True
    companions = frozenset({"weight_scale", "weight_scale_2", "input_scale"})
    side_file = SideFile(
        HF_QUANT_CONFIG, "ModelOpt's own declaration", _check_side_file, _complete_side_file
    )

    @override
    def read(self, keys: ObjectReader) -> DeclaredScheme:
        # The nested form, flattened
        algo = keys.choice("quant_algo", *_ALGORITHMS)
        cache = of_modelopt(keys)
        dtype, granularity, activations = _ALGORITHMS[algo]
        group_size = next(iter(NUMBER_FORMATS[dtype].sizes[granularity]), None)
        if group_size is not None:
            keys.optional("group_size", group_size)
        else:
            keys.absent("group_size")
        if keys.has("config_groups") and keys.plain("config_groups") != {}:
            group = only_group(keys)
            # Weight-only under NVFP4's name: what an engine makes of it, it says itself.
            if keys.strictness != "engine" and not group.has("input_activations"):
                activations = "none" if algo == "NVFP4" else activations
            _check_group(group, granularity, group_size)
        return DeclaredScheme(
            layout=self,
            weight_dtype=dtype,
            granularity=granularity,
            group_size=group_size,
            pack_method=None,
            activations=activations,
            kv_cache=cache,
        )

    @override
    def excludes(self, keys: ObjectReader) -> tuple[str, ...]:
        excludes = keys.strings("exclude_modules" if keys.has("exclude_modules") else "ignore")
        # Engines read one list or the other: they must not exclude different modules.
        if keys.has("ignore") and set(keys.strings("ignore")) != set(excludes):
            raise not_understood(
                keys.where,
                f"{keys.key}.ignore",
                (f"the same patterns as exclude_modules {sorted(excludes)}",),
                sorted(keys.strings("ignore")),
            )
        return excludes

    @override
    def complete(
        self, recipe: Recipe, excludes: list[str], own: Sequence[OwnFormat] = ()
    ) -> dict[str, Any]:
        weights, rounded = recipe.weights, recipe.activations is not None
        whole: dict[str, Any] = {"quant_method": "modelopt", "producer": _PRODUCER}
        whole |= dict.fromkeys(self.exclude_keys, excludes)
        if recipe.kv_cache is not None:
            whole["kv_cache_scheme"] = complete_spec_of(recipe.kv_cache.dtype)
        if weights.granularity == "channel":
            return whole | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
        args: dict[str, Any] = {"type": "float", "num_bits": 8, "dynamic": False}
        whole["quant_algo"] = "FP8"
        if weights.number.global_scale:
            args |= {"num_bits": 4, "group_size": weights.group_size}
            whole["quant_algo"] = "NVFP4" if rounded else "W4A16_NVFP4"
            whole["group_size"] = weights.group_size
        inputs = {"input_activations": args} if rounded else {}
        group = {"targets": ["Linear"], "weights": args, **inputs}
        return whole | {"config_groups": {"group_0": group}}

    @override
    def excludes_module(self, pattern: str, module: str) -> bool:
        """Shell wildcards."""
        return fnmatch.fnmatchcase(module, pattern)

    @override
    def parts(
        self, scheme: DeclaredScheme, rows: int, columns: int, scale_dtypes: tuple[str, ...]
    ) -> Parts:
        parts = {"weight": stored_codes(scheme, rows, columns)}
        if scheme.number.global_scale:
            groups = group_count(scheme, columns)
            parts["weight_scale"] = Part(("F8_E4M3",), (rows, groups))
            parts["weight_scale_2"] = Part(("F32",), ())
        else:
            per_row = (rows,) if scheme.granularity == "channel" else ()
            parts["weight_scale"] = Part(("F32",), per_row)
        if scheme.activations in ("tensor-static", "nvfp4"):
            parts["input_scale"] = Part(("F32",), ())
        return parts


def _check_group(group: ObjectReader, granularity: Granularity, group_size: int | None) -> None:
    """`config_groups` says the same as the name of the algorithm."""
    for part in ("input_activations", "weights"):
        if not group.has(part):
            continue
        args = group.section(part, ignored=SPEC_NO_MEANING)
        args.choice("num_bits", 4 if group_size else 8)
        args.choice("type", "float")
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


# ---- Plain `fp8`, as vLLM and SGLang read it: per matrix, or per 128 x 128 block

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
