"""NVIDIA ModelOpt 0.47: FP8 per tensor and static, FP8 per channel and token, NVFP4."""

from collections.abc import Mapping
from typing import Any

from ...files.checkpoint import CONFIG_FILE, Checkpoint, read_json_object
from .compressed_tensors import only_group
from .raw import HF_QUANT_CONFIG
from .reader import ObjectReader, not_understood
from .scheme import SPEC_NO_MEANING, Activations, DeclaredScheme, Granularity, WeightDtype

_ALGORITHMS: dict[str, tuple[WeightDtype, Granularity, int | None, Activations]] = {
    "FP8": ("fp8_e4m3", "tensor", None, "tensor-static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3", "channel", None, "token-dynamic"),
    "NVFP4": ("nvfp4", "group", 16, "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", "group", 16, "none"),
}


def read(keys: ObjectReader) -> DeclaredScheme:
    """Read a `quantization_config` with quant_method "modelopt"; the nested form, flattened.

    Raises:
        VerifyError: it says something that is not understood.
    """
    algo = keys.choice("quant_algo", *_ALGORITHMS)
    keys.absent("kv_cache_quant_algo", "kv_cache_scheme")
    dtype, granularity, group_size, activations = _ALGORITHMS[algo]
    if group_size is not None:
        keys.optional("group_size", group_size)
    else:
        keys.absent("group_size")
    if keys.has("config_groups"):
        _check_group(only_group(keys), granularity, group_size)
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
        weight_dtype=dtype,
        granularity=granularity,
        group_size=group_size,
        pack_method=None,
        activations=activations,
        excludes=excludes,
    )


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


def check_side_file(checkpoint: Checkpoint, scheme: DeclaredScheme, algo: str) -> None:
    """TensorRT-LLM reads hf_quant_config.json: what it says must be what config.json says.

    Raises:
        VerifyError: it says something else.
        CheckpointError: it is not readable as JSON.
    """
    path = checkpoint.folder / HF_QUANT_CONFIG
    if not path.exists():
        return
    content: Mapping[str, Any] = read_json_object(path, "write it again from config.json")
    outer = ObjectReader.of(content, path, "", ignored={"producer", "version"})
    keys = outer.section("quantization")
    outer.finish()
    keys.choice("quant_algo", algo)
    keys.absent("kv_cache_quant_algo")
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
