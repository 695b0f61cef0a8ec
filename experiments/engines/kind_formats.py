"""How other tools store and declare what is quantized: shapes, names and keys.

The keys are those of GPTQModel 5, auto-round 0.9, llm-compressor, AutoAWQ, Quark and DeepSeek.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Suffix -> dtype and shape of one stored tensor of a linear."""
Store = Callable[[int, int], Shapes]
"""Rows and columns of a linear -> its stored tensors."""


def gptq(rows: int, columns: int) -> Shapes:
    """GPTQModel's."""
    return {**auto_round(rows, columns), "g_idx": ("I32", (columns,))}


def auto_round(rows: int, columns: int) -> Shapes:
    """auto-round in its `auto_gptq` packing."""
    return {
        "qweight": ("I32", (columns // 8, rows)),
        "qzeros": ("I32", (-(-columns // 128), rows // 8)),
        "scales": ("F16", (-(-columns // 128), rows)),
    }


def awq(rows: int, columns: int) -> Shapes:
    """AutoAWQ's."""
    return {
        "qweight": ("I32", (columns, rows // 8)),
        "qzeros": ("I32", (columns // 128, rows // 8)),
        "scales": ("F16", (columns // 128, rows)),
    }


def fp8(rows: int, columns: int) -> Shapes:
    """One scale per tensor, and one for the input."""
    one: tuple[str, tuple[int, ...]] = ("F32", ())
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": one, "input_scale": one}


def fp8_rows(dtype: str, *axes: int) -> Store:
    """One scale per row: BF16, [rows, 1] of llm-compressor; F32, [rows] of Quark."""
    return lambda rows, columns: {
        "weight": ("F8_E4M3", (rows, columns)),
        "weight_scale": (dtype, (rows, *axes)),
    }


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


GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
    "lm_head": False, "checkpoint_format": "gptq", "true_sequential": True, "static_groups": False,
    "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.2.0"]},
}  # fmt: skip
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "autoround_version": "0.9.2", "iters": 200,
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": ["fc", "lm_head"],
}  # fmt: skip
BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.47.0"}}


def _args(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    named = {"num_bits": 8, "type": "float", "strategy": strategy}
    return {**named, "symmetric": True, "dynamic": dynamic}


CT_FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": _args("channel", dynamic=False),
        "input_activations": _args("token", dynamic=True), "output_activations": None,
        "format": "float-quantized",
    }},
    "ignore": ["re:.*fc$", "re:.*lm_head$"], "kv_cache_scheme": None,
    "quantization_status": "compressed",
}  # fmt: skip


def _spec(axis: int, *, is_dynamic: bool) -> dict[str, Any]:
    """One QTensorConfig of Quark."""
    return {
        "dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": is_dynamic, "symmetric": True,
        "observer_cls": "PerTensorMinMaxObserver", "scale_type": "float",
        "round_method": "half_even", "ch_axis": axis, "group_size": None, "is_scale_quant": False,
        "scale_format": None, "scale_calculation_mode": None, "mx_element_dtype": None,
    }  # fmt: skip


QUARK = {
    "quant_method": "quark", "quant_mode": "eager_mode",
    "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
               "weight_format": "real_quantized", "weight_merge_groups": None},
    "exclude": [], "algo_config": None, "softmax_quant_spec": None,
    "global_quant_config": {
        "weight": _spec(0, is_dynamic=False), "input_tensors": _spec(1, is_dynamic=True),
        "output_tensors": None, "bias": None, "target_device": None,
    },
    "layer_quant_config": {}, "layer_type_quant_config": {}, "kv_cache_quant_config": {},
    "version": "0.13",
}  # fmt: skip


def excluding(declared: Mapping[str, Any], key: str) -> Callable[[Sequence[str]], dict[str, Any]]:
    """A declaration that excludes names, and the head."""
    return lambda names: {**declared, key: ["lm_head", *names]}
