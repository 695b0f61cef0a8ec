"""How other tools store and declare a quantized draft, imitated by hand: shapes, names and keys.

Codes and scales are random: what is asked is whether an engine's loader takes them, not what they
say. The keys are those of GPTQModel 5, auto-round 0.9, llm-compressor, AutoAWQ, ModelOpt and
DeepSeek.
"""

from collections.abc import Callable, Mapping
from typing import Any

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Suffix -> dtype and shape of one stored tensor of a linear."""
Store = Callable[[int, int], Shapes]
"""Rows and columns of a linear -> its stored tensors."""


def gptq(*, g_idx: bool = True) -> Store:
    """GPTQModel, and auto-round in its `auto_gptq` packing (without g_idx)."""

    def shapes(rows: int, columns: int) -> Shapes:
        groups = -(-columns // 128)
        found = {
            "qweight": ("I32", (columns // 8, rows)),
            "qzeros": ("I32", (groups, rows // 8)),
            "scales": ("F16", (groups, rows)),
        }
        return found | ({"g_idx": ("I32", (columns,))} if g_idx else {})

    return shapes


def awq(rows: int, columns: int) -> Shapes:
    """AutoAWQ, and auto-round in its `auto_awq` packing."""
    return {
        "qweight": ("I32", (columns, rows // 8)),
        "qzeros": ("I32", (columns // 128, rows // 8)),
        "scales": ("F16", (columns // 128, rows)),
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


def fp8_blocks(rows: int, columns: int) -> Shapes:
    """One scale per block of 128 x 128, as DeepSeek's own."""
    blocks = (-(-rows // 128), -(-columns // 128))
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": ("F32", blocks)}


def modelopt_nvfp4(rows: int, columns: int) -> Shapes:
    """ModelOpt's NVFP4."""
    return {
        "weight": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }


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


def quark_config(weight: Any, inputs: Any, exclude: list[str], **more: Any) -> dict[str, Any]:
    """As Quark exports it."""
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "exclude": exclude,
        "algo_config": None,
        "softmax_quant_spec": None,
        "global_quant_config": {
            "weight": weight,
            "input_tensors": inputs,
            "output_tensors": None,
            "bias": None,
            "target_device": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "version": "0.13",
        **more,
    }


def quark_spec(dtype: str, scheme: str, **more: Any) -> dict[str, Any]:
    """One QTensorConfig."""
    return {
        "dtype": dtype,
        "qscheme": scheme,
        "is_dynamic": False,
        "symmetric": True,
        "observer_cls": "PerTensorMinMaxObserver",
        "scale_type": "float",
        "round_method": "half_even",
        "ch_axis": None,
        "group_size": None,
        "is_scale_quant": False,
        "scale_format": None,
        "scale_calculation_mode": None,
        "mx_element_dtype": None,
        **more,
    }
