"""The `quantization_config` of folders made by hand, as their tools print it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from handmade_numbers import group_width

if TYPE_CHECKING:
    from handmade import Made

EXCLUDES = ["embed_tokens", "model.embed_tokens", "fc", "model.fc", "lm_head"]


def declaration(made: "Made") -> dict[str, Any]:
    """The quantization_config."""
    if made.layout == "quark":
        return _quark(made)
    if made.layout == "modelopt":
        return _modelopt(made)
    if made.layout == "awq":
        return {"bits": 4, "group_size": 32, "modules_to_not_convert": EXCLUDES,
                "quant_method": "awq", "version": "gemm", "zero_point": True}  # fmt: skip
    if made.layout == "fp8":
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "ignored_layers": EXCLUDES,
                "quant_method": "fp8", "weight_block_size": [128, 128]}  # fmt: skip
    return _compressed_tensors(made)


_FORMS = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int"}),
    "int8": ("pack-quantized", {"num_bits": 8, "type": "int"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
}


def _compressed_tensors(made: "Made") -> dict[str, Any]:
    args = {"symmetric": True, "group_size": None, "actorder": None, "block_structure": None}
    form, bits = _FORMS[made.dtype]
    inputs: Mapping[str, Any] | None = None
    if made.granularity == "block":
        inputs = args | bits | {"strategy": "group", "group_size": 128, "dynamic": True}
    elif made.activations != "none":
        dynamic = made.activations == "dynamic"
        fp8 = _FORMS["fp8"][1]
        inputs = args | fp8 | {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    strategy = "tensor_group" if made.dtype == "nvfp4" else made.granularity
    weights = args | bits | {"strategy": strategy, "dynamic": False, "observer": "minmax"}
    if made.granularity == "block":
        weights["block_structure"] = [128, 128]
    else:
        weights["group_size"] = group_width(made.dtype, made.granularity)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "config_groups": {"group_0": group | {"output_activations": None, "format": form}},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["re:.*embed_tokens$", "re:(model\\.)?fc$", "lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    }


def _quark(made: "Made") -> dict[str, Any]:
    """As printed by Quark 0.13 (reference/quark.md section 2)."""
    common: dict[str, Any] = {
        "block_size": None, "enable_buffer_reuse": False, "group_size": None, "is_dynamic": False,
        "is_scale_quant": False, "max_input_numel": 4194304, "mx_element_dtype": None,
        "observer_cls": "PerChannelMinMaxObserver", "round_method": "half_even",
        "scale_calculation_mode": None, "scale_format": None, "scale_type": "float",
        "symmetric": True, "zero_point_type": "int32", "qscheme": "per_channel",
    }  # fmt: skip
    dtype = {"int4": "int4", "fp8": "fp8_e4m3", "mxfp4": "fp4"}[made.dtype]
    axis = {"channel": 0, "tensor": None, "group": 1}[made.granularity]
    weight = common | {"dtype": dtype, "qscheme": f"per_{made.granularity}", "ch_axis": axis,
                       "group_size": group_width(made.dtype, made.granularity)}  # fmt: skip
    if made.dtype == "mxfp4":
        weight |= {"ch_axis": -1, "observer_cls": "PerBlockMXObserver", "scale_format": "e8m0",
                   "scale_calculation_mode": "even", "symmetric": None}  # fmt: skip
    inputs = None
    if made.activations != "none":
        dynamic = made.activations == "dynamic"
        inputs = common | {"dtype": "fp8_e4m3", "is_dynamic": dynamic,
                           "qscheme": "per_channel" if dynamic else "per_tensor",
                           "ch_axis": 1 if dynamic else None}  # fmt: skip
    return {
        "algo_config": None,
        "exclude": EXCLUDES,
        "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": made.pack_method,
                   "weight_format": "real_quantized", "weight_merge_groups": None},
        "global_quant_config": {"bias": None, "input_tensors": inputs, "output_tensors": None,
                                "target_device": None, "weight": weight},
        "kv_cache_post_rope": False, "kv_cache_quant_config": {}, "layer_quant_config": {},
        "layer_type_quant_config": {}, "quant_method": "quark", "quant_mode": "eager_mode",
        "softmax_quant_spec": None, "version": "0.13",
    }  # fmt: skip


def _modelopt(made: "Made") -> dict[str, Any]:
    excludes = {"exclude_modules": EXCLUDES, "ignore": EXCLUDES}
    both = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quant_method": "modelopt"}
    if made.granularity == "channel":
        return both | excludes | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    if made.dtype == "nvfp4":
        args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"targets": ["Linear"], "weights": args}
        algorithm = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        return both | excludes | algorithm | {"config_groups": {"group_0": group}}
    args = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": args, "targets": ["Linear"], "weights": args}
    return both | excludes | {"quant_algo": "FP8", "config_groups": {"group_0": group}}
