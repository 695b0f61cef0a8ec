"""How other tools store and declare a quantized draft, imitated by hand: shapes, names and keys.

Codes and scales are random: what is asked is whether an engine's loader takes them, not what they
say. The keys are those of GPTQModel 5, auto-round 0.9, llm-compressor, AutoAWQ, ModelOpt and
DeepSeek.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tiny import Stored, store

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Suffix -> dtype and shape of one stored tensor of a linear."""
Store = Callable[[int, int], Shapes]
"""Rows and columns of a linear -> its stored tensors."""
_NUMPY = {"I32": np.int32, "I64": np.int64, "U8": np.uint8, "I8": np.int8, "F8_E4M3": np.uint8}


def random_tensor(
    rng: np.random.Generator, suffix: str, dtype: str, shape: tuple[int, ...]
) -> Stored:
    """Codes of any bits but those that mean NaN in FP8; scales that are small and positive."""
    if dtype in ("BF16", "F16", "F32"):
        one = np.full(shape, 0.01) if len(shape) < 2 and shape in ((), (1,)) else None
        values = rng.uniform(0.005, 0.02, shape) if one is None else one
        return store(np.asarray(values), dtype)
    if suffix.endswith("g_idx"):
        return Stored(dtype, shape, (np.arange(shape[0], dtype=np.int32) // 128).tobytes())
    kind = _NUMPY[dtype]
    if dtype == "F8_E4M3":
        codes = rng.integers(0, 0x70, shape, dtype=np.uint8)
    else:
        info = np.iinfo(kind)
        codes = rng.integers(info.min, info.max, shape, dtype=kind)
    return Stored(dtype, shape, codes.astype(kind).tobytes())


def gptq(*, bits: int = 4, size: int = 128, g_idx: bool = True, scales: str = "F16") -> Store:
    """GPTQModel, and auto-round in its `auto_gptq` packing (without g_idx)."""

    def shapes(rows: int, columns: int) -> Shapes:
        groups = -(-columns // size) if size > 0 else 1
        found = {
            "qweight": ("I32", (columns * bits // 32, rows)),
            "qzeros": ("I32", (groups, rows * bits // 32)),
            "scales": (scales, (groups, rows)),
        }
        return found | ({"g_idx": ("I32", (columns,))} if g_idx else {})

    return shapes


def awq(*, size: int = 128) -> Store:
    """AutoAWQ, and auto-round in its `auto_awq` packing."""

    def shapes(rows: int, columns: int) -> Shapes:
        return {
            "qweight": ("I32", (columns, rows // 8)),
            "qzeros": ("I32", (columns // size if size > 0 else 1, rows // 8)),
            "scales": ("F16", (columns // size if size > 0 else 1, rows)),
        }

    return shapes


def packed(*, bits: int = 4, size: int = 128) -> Store:
    """compressed-tensors' pack-quantized integers."""

    def shapes(rows: int, columns: int) -> Shapes:
        groups = columns // size if size > 0 else 1
        return {
            "weight_packed": ("I32", (rows, columns * bits // 32)),
            "weight_scale": ("BF16", (rows, groups)),
            "weight_shape": ("I64", (2,)),
        }

    return shapes


def int8(rows: int, columns: int) -> Shapes:
    """compressed-tensors' W8A8 with an input scale of its own."""
    return {
        "weight": ("I8", (rows, columns)),
        "weight_scale": ("BF16", (rows, 1)),
        "input_scale": ("BF16", (1,)),
    }


def fp8(rows: int, columns: int) -> Shapes:
    """One scale per tensor, and one for the input."""
    return {
        "weight": ("F8_E4M3", (rows, columns)),
        "weight_scale": ("F32", ()),
        "input_scale": ("F32", ()),
    }


def fp8_tokens(rows: int, columns: int) -> Shapes:
    """One scale per row, as llm-compressor's FP8_DYNAMIC."""
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("BF16", (rows, 1))}


def fp8_blocks(suffix: str = "weight_scale_inv", dtype: str = "F32") -> Store:
    """One scale per block of 128 x 128, as DeepSeek's own."""

    def shapes(rows: int, columns: int) -> Shapes:
        blocks = (-(-rows // 128), -(-columns // 128))
        return {"weight": ("F8_E4M3", (rows, columns)), suffix: (dtype, blocks)}

    return shapes


def nvfp4(*, inputs: bool = True) -> Store:
    """compressed-tensors' NVFP4."""

    def shapes(rows: int, columns: int) -> Shapes:
        found = {
            "weight_packed": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", (rows, columns // 16)),
            "weight_global_scale": ("F32", (1,)),
        }
        return found | ({"input_global_scale": ("F32", (1,))} if inputs else {})

    return shapes


def modelopt_nvfp4(rows: int, columns: int) -> Shapes:
    """ModelOpt's NVFP4."""
    return {
        "weight": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }


KEPT_FC = {"-:.*fc$": {}, "-:.*lm_head$": {}}
KV_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def declared_gptq(**changes: Any) -> dict[str, Any]:
    """As GPTQModel writes it."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "true_sequential": True,
        "static_groups": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:5.2.0"]},
        **changes,
    }


def declared_auto_round(**changes: Any) -> dict[str, Any]:
    """As auto-round writes it."""
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "autoround_version": "0.9.2",
        "iters": 200,
        **changes,
    }


def declared_awq(**changes: Any) -> dict[str, Any]:
    """As AutoAWQ writes it."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["fc", "lm_head"],
        **changes,
    }


def declared_blocks(**changes: Any) -> dict[str, Any]:
    """As DeepSeek writes it."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        **changes,
    }


def declared_fp8(**changes: Any) -> dict[str, Any]:
    """Plain fp8 with static inputs."""
    return {"quant_method": "fp8", "activation_scheme": "static", **changes}


def declared_ct(
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any] | None,
    form: str,
    *,
    ignore: tuple[str, ...] = ("re:.*fc$", "re:.*lm_head$"),
    **changes: Any,
) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {**group, "output_activations": None, "format": form}},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **changes,
    }


def args(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """`QuantizationArgs` as it is written."""
    named = {"num_bits": bits, "type": kind, "strategy": strategy}
    return {**named, "symmetric": True, "dynamic": False, **more}
