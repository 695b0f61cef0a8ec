"""What a quantized folder declares in config.json: scheme, storage rule and excluded modules.

Read strictly and without any code of the writing side: a declaration that is not understood is an
error, never a guess. It knows JSON, not tensors.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .checkpoint import CONFIG_FILE, Checkpoint, read_json_object
from .declared_json import ObjectReader, not_understood

Layout = Literal["quark", "compressed-tensors", "modelopt"]
WeightDtype = Literal["int4", "fp8_e4m3"]
Granularity = Literal["channel", "tensor"]
PackMethod = Literal["order", "reorder"]
Activations = Literal["none", "token-dynamic", "tensor-static"]
PACK_METHODS: tuple[PackMethod, ...] = ("order", "reorder")
_WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("int4", "fp8_e4m3")
_GRANULARITIES: tuple[Granularity, ...] = ("channel", "tensor")
HF_QUANT_CONFIG = "hf_quant_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredScheme:
    """How every linear that is not excluded is stored: w ≈ code * scale.

    Attributes:
        granularity: one scale per output row, or one for the whole matrix.
        pack_method: which column each nibble of an INT4 word holds; None for FP8.
        activations: how the input of these linears is rounded to FP8 at run time.
        excludes: the patterns as written.
    """

    layout: Layout
    weight_dtype: WeightDtype
    granularity: Granularity
    pack_method: PackMethod | None
    activations: Activations
    excludes: tuple[str, ...]

    def is_excluded(self, module: str) -> bool:
        """True if a pattern matches the whole name `module`.

        Patterns are exact names; `re:` regular expressions matched from the start (quark,
        compressed-tensors); shell wildcards (quark, modelopt).
        """
        return any(self._matches(pattern, module) for pattern in self.excludes)

    def _matches(self, pattern: str, module: str) -> bool:
        if pattern.startswith("re:") and self.layout != "modelopt":
            return re.match(pattern[3:], module) is not None
        if self.layout == "compressed-tensors":
            return pattern == module
        return fnmatch.fnmatchcase(module, pattern)

    def __str__(self) -> str:
        packing = f" ({self.pack_method})" if self.pack_method else ""
        weights = f"{self.layout} {self.weight_dtype} per {self.granularity}{packing}"
        return f"{weights}, activations {self.activations}"


def declared_scheme(checkpoint: Checkpoint) -> DeclaredScheme | None:
    """Read the `quantization_config` of a folder; None where there is none: nothing is quantized.

    Raises:
        VerifyError: the declaration says something that this reader does not understand, or two
            declarations of one folder disagree.
        CheckpointError: hf_quant_config.json is not readable as JSON.
    """
    declared = checkpoint.config.get("quantization_config")
    if declared is None:
        return None
    keys = ObjectReader.of(
        declared, checkpoint.folder / CONFIG_FILE, "quantization_config", ignored=_NO_MEANING
    )
    method = keys.choice("quant_method", "quark", "compressed-tensors", "modelopt")
    if method == "quark":
        scheme = _quark(keys)
    elif method == "compressed-tensors":
        scheme = _compressed_tensors(keys)
    else:
        scheme = _modelopt(keys)
        _check_nested(checkpoint, scheme, str(declared["quant_algo"]))
    keys.finish()
    _check_patterns(keys, scheme)
    return scheme


def _check_patterns(keys: ObjectReader, scheme: DeclaredScheme) -> None:
    """Every `re:` pattern compiles."""
    for pattern in scheme.excludes:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as exc:
                understood = (f"a regular expression ({exc})",)
                raise not_understood(keys.where, keys.key, understood, pattern) from exc


# Keys that say who made the folder or how values were found, never how to decode them.
_NO_MEANING = frozenset({"producer", "version", "quant_mode", "global_compression_ratio"})
_SPEC_NO_MEANING = frozenset(
    {
        "enable_buffer_reuse",
        "max_input_numel",
        "observer",
        "observer_cls",
        "observer_kwargs",
        "round_method",
        "scale_type",
    }
)


def _quark(keys: ObjectReader) -> DeclaredScheme:
    """AMD Quark 0.13, `real_quantized` export; see `ModelQuantizer` and `export_safetensors`."""
    keys.absent(
        "algo_config",
        "kv_cache_quant_config",
        "layer_quant_config",
        "layer_type_quant_config",
        "softmax_quant_spec",
        "kv_cache_post_rope",
    )
    export = keys.section("export", ignored={"min_kv_scale"})
    pack_method = export.choice("pack_method", *PACK_METHODS)
    export.choice("weight_format", "real_quantized")
    export.absent("kv_cache_group", "weight_merge_groups")
    export.finish()
    section = keys.section("global_quant_config", ignored={"target_device"})
    section.absent("bias", "output_tensors")
    dtype, granularity = _quark_weight(section.section("weight", ignored=_SPEC_NO_MEANING))
    activations: Activations = "none"
    if section.has("input_tensors"):
        activations = _quark_input(section.section("input_tensors", ignored=_SPEC_NO_MEANING))
    section.finish()
    return DeclaredScheme(
        layout="quark",
        weight_dtype=dtype,
        granularity=granularity,
        pack_method=pack_method if dtype == "int4" else None,
        activations=activations,
        excludes=keys.strings("exclude"),
    )


_QUARK_UNUSED = (
    "block_size",
    "group_size",
    "is_scale_quant",
    "mx_element_dtype",
    "scale_calculation_mode",
    "scale_format",
)


def _quark_weight(spec: ObjectReader) -> tuple[WeightDtype, Granularity]:
    dtype = spec.choice("dtype", *_WEIGHT_DTYPES)
    if dtype == "int4":
        spec.choice("qscheme", "per_channel")
        spec.choice("symmetric", True)
        spec.optional("zero_point_type", "int32", None)
    else:
        spec.optional("symmetric", True, None)
        spec.optional("zero_point_type", "int32", "float32", None)
    scheme = spec.choice("qscheme", "per_channel", "per_tensor")
    spec.optional("ch_axis", *((0,) if scheme == "per_channel" else (None,)))
    spec.absent("is_dynamic", *_QUARK_UNUSED)
    spec.finish()
    return dtype, "channel" if scheme == "per_channel" else "tensor"


def _quark_input(spec: ObjectReader) -> Activations:
    spec.choice("dtype", "fp8_e4m3")
    spec.optional("symmetric", True, None)
    spec.optional("zero_point_type", "int32", "float32", None)
    scheme = spec.choice("qscheme", "per_channel", "per_tensor")
    spec.choice("is_dynamic", scheme == "per_channel")
    # Quark spells "per token" as per_channel along the axis of tokens.
    spec.optional("ch_axis", *((1,) if scheme == "per_channel" else (None,)))
    spec.absent(*_QUARK_UNUSED)
    spec.finish()
    return "token-dynamic" if scheme == "per_channel" else "tensor-static"


def _compressed_tensors(keys: ObjectReader) -> DeclaredScheme:
    """compressed-tensors 0.20, `QuantizationConfig`; one group that targets every Linear."""
    form = keys.choice("format", "pack-quantized", "float-quantized")
    keys.optional("quantization_status", "compressed")
    keys.absent("kv_cache_scheme", "sparsity_config", "transform_config")
    group = _only_group(keys)
    group.optional("format", form, None)
    group.absent("output_activations")
    weights = group.section("weights", ignored=_SPEC_NO_MEANING)
    int4 = form == "pack-quantized"
    granularity = weights.choice("strategy", *(_GRANULARITIES[:1] if int4 else _GRANULARITIES))
    _float_or_int(weights, bits=4 if int4 else 8, kind="int" if int4 else "float")
    weights.absent("dynamic")
    weights.finish()
    activations: Activations = "none"
    if group.has("input_activations"):
        inputs = group.section("input_activations", ignored=_SPEC_NO_MEANING)
        _float_or_int(inputs, bits=8, kind="float")
        strategy = inputs.choice("strategy", "token", "tensor")
        inputs.choice("dynamic", strategy == "token")
        inputs.finish()
        activations = "token-dynamic" if strategy == "token" else "tensor-static"
    group.finish()
    return DeclaredScheme(
        layout="compressed-tensors",
        weight_dtype="int4" if int4 else "fp8_e4m3",
        granularity=granularity,
        pack_method="order" if int4 else None,
        activations=activations,
        excludes=keys.strings("ignore"),
    )


def _float_or_int(args: ObjectReader, *, bits: int, kind: str) -> None:
    args.choice("num_bits", bits)
    args.choice("type", kind)
    args.choice("symmetric", True)
    args.absent("group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype")


def _only_group(keys: ObjectReader) -> ObjectReader:
    groups = keys.section("config_groups")
    group = groups.section("group_0")
    groups.finish()
    if group.strings("targets") != ("Linear",):
        raise not_understood(
            group.where, f"{group.key}.targets", ("['Linear']",), list(group.strings("targets"))
        )
    return group


def _modelopt(keys: ObjectReader) -> DeclaredScheme:
    """NVIDIA ModelOpt 0.47, the flat form: FP8 per tensor and static, or per channel and token."""
    algo = keys.choice("quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    keys.absent("kv_cache_quant_algo", "kv_cache_scheme")
    channel = algo == "FP8_PER_CHANNEL_PER_TOKEN"
    if keys.has("config_groups"):
        group = _only_group(keys)
        for part in ("input_activations", "weights"):
            args = group.section(part, ignored=_SPEC_NO_MEANING)
            args.choice("num_bits", 8)
            args.choice("type", "float")
            args.optional("dynamic", channel and part == "input_activations")
            strategy = ("token" if part == "input_activations" else "channel") if channel else None
            args.optional("strategy", *((strategy,) if channel else ("tensor", None)))
            args.finish()
        group.finish()
    excludes = keys.strings("exclude_modules" if keys.has("exclude_modules") else "ignore")
    # Engines read one list or the other: they must not exclude different modules.
    if keys.has("ignore") and set(keys.strings("ignore")) != set(excludes):
        raise not_understood(
            keys.where,
            f"{keys.key}.ignore",
            (f"the same patterns as exclude_modules {sorted(excludes)}",),
            sorted(keys.strings("ignore")),
        )
    return DeclaredScheme(
        layout="modelopt",
        weight_dtype="fp8_e4m3",
        granularity="channel" if channel else "tensor",
        pack_method=None,
        activations="token-dynamic" if channel else "tensor-static",
        excludes=excludes,
    )


def _check_nested(checkpoint: Checkpoint, scheme: DeclaredScheme, algo: str) -> None:
    """TensorRT-LLM reads hf_quant_config.json: what it says must be what config.json says."""
    path = checkpoint.folder / HF_QUANT_CONFIG
    if not path.exists():
        return
    content: Mapping[str, Any] = read_json_object(path, "write it again from config.json")
    outer = ObjectReader.of(content, path, "", ignored=_NO_MEANING)
    keys = outer.section("quantization")
    outer.finish()
    keys.choice("quant_algo", algo)
    keys.absent("kv_cache_quant_algo")
    if set(keys.strings("exclude_modules")) != set(scheme.excludes):
        raise not_understood(
            path,
            "quantization.exclude_modules",
            (f"{sorted(scheme.excludes)} as in {CONFIG_FILE}",),
            sorted(keys.strings("exclude_modules")),
        )
    keys.finish()
