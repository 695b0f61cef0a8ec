"""Quantized folders made by hand: the layouts of the specification, slow and obvious, in numpy.

Nothing of the package is used here, so that neither the writing nor the reading side can be wrong
in the same way as this.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tiny import Stored, read_tensors, store, values_of, write_tensors

Array = npt.NDArray[Any]
ORDER = {"order": [0, 1, 2, 3, 4, 5, 6, 7], "reorder": [0, 2, 4, 6, 1, 3, 5, 7]}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXCLUDES = ["embed_tokens", "model.embed_tokens", "fc", "model.fc", "lm_head"]


class Made(NamedTuple):
    """One way to quantize a folder."""

    layout: Literal["quark", "compressed-tensors", "modelopt"]
    dtype: Literal["int4", "fp8"]
    granularity: Literal["channel", "tensor"] = "channel"
    activations: Literal["none", "dynamic", "static"] = "none"
    pack_method: str = "reorder"


MADE: dict[str, Made] = {
    "quark-int4": Made("quark", "int4"),
    "quark-int4-order": Made("quark", "int4", pack_method="order"),
    "quark-int4-dynamic": Made("quark", "int4", activations="dynamic"),
    "quark-int4-static": Made("quark", "int4", activations="static"),
    "quark-fp8": Made("quark", "fp8", activations="dynamic"),
    "quark-fp8-static": Made("quark", "fp8", "tensor", "static"),
    "ct-int4": Made("compressed-tensors", "int4"),
    "ct-fp8": Made("compressed-tensors", "fp8", activations="dynamic"),
    "ct-fp8-static": Made("compressed-tensors", "fp8", "tensor", "static"),
    "modelopt-fp8": Made("modelopt", "fp8", "tensor", "static"),
    "modelopt-fp8-pcpt": Made("modelopt", "fp8", "channel", "dynamic"),
}


def quantize_by_hand(source: Path, out: Path, made: Made, *, input_scale: float = 0.05) -> Path:
    """Quantize every attention and MLP linear of `source` into the new folder `out`."""
    shutil.copytree(source, out)
    tensors = read_tensors(source)
    quantized: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LINEARS:
            quantized |= encode(module, tensor, made, input_scale)
        else:
            quantized[name] = tensor
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = declaration(made)
    (out / "config.json").write_text(json.dumps(config))
    if made.layout == "modelopt":
        nested = {
            "quant_algo": config["quantization_config"]["quant_algo"],
            "kv_cache_quant_algo": None,
            "exclude_modules": EXCLUDES,
        }
        both = {"producer": {"name": "modelopt"}, "quantization": nested}
        (out / "hf_quant_config.json").write_text(json.dumps(both))
    sharded = (source / "model.safetensors.index.json").exists()
    write_tensors(out, quantized, sharded=sharded, metadata={"format": "pt"})
    return out


def encode(module: str, weight: Stored, made: Made, input_scale: float) -> dict[str, Stored]:
    """The stored tensors of one linear."""
    parts = encode_int4(weight, made) if made.dtype == "int4" else encode_fp8(weight, made)
    if made.activations == "static":
        shape = (1,) if made.layout == "compressed-tensors" else ()
        parts["input_scale"] = store(np.full(shape, input_scale, np.float32), "F32")
    return {f"{module}.{suffix}": tensor for suffix, tensor in parts.items()}


def encode_int4(weight: Stored, made: Made) -> dict[str, Stored]:
    w = values_of(weight)
    rows, columns = w.shape
    scale = store(np.maximum(np.abs(w).max(1) / 7.5, 2.0**-23), weight.dtype)
    inv_scale = np.float32(1) / values_of(scale)
    codes = np.clip(np.rint(w * inv_scale[:, None]), -8, 7).astype(int)
    if made.layout == "compressed-tensors":
        return {
            "weight_packed": pack(codes + 8, "order"),
            "weight_scale": scale._replace(shape=(rows, 1)),
            "weight_shape": Stored("I64", (2,), np.array([rows, columns]).tobytes()),
        }
    return {
        "weight": pack(codes, made.pack_method),
        "weight_scale": scale,
        "weight_zero_point": Stored("I32", (rows // 8,), bytes(rows // 8 * 4)),
    }


def encode_fp8(weight: Stored, made: Made) -> dict[str, Stored]:
    w = values_of(weight)
    absmax = np.abs(w).max(1) if made.granularity == "channel" else np.abs(w).max()
    scale = np.where(absmax > 0, absmax / np.float32(448), 1).astype(np.float32)
    divided = w / (scale[:, None] if scale.shape else scale)
    data = nearest_e4m3(divided)
    shape = scale.shape
    if made.layout == "compressed-tensors":
        shape = (*shape, 1)
    return {
        "weight": Stored("F8_E4M3", w.shape, data),
        "weight_scale": Stored("F32", shape, scale.tobytes()),
    }


def pack(codes: Array, pack_method: str) -> Stored:
    """Eight codes per int32 word, four bits each; columns are padded with zero nibbles."""
    rows, columns = codes.shape
    words = []
    for row in codes.tolist():
        row += [0] * (-columns % 8)
        for c in range(0, len(row), 8):
            word = 0
            for nibble, column in enumerate(ORDER[pack_method]):
                word |= (row[c + column] & 15) << (4 * nibble)
            words.append(word)
    data = np.array(words, np.uint32).tobytes()
    return Stored("I32", (rows, len(words) // rows), data)


def e4m3_value(code: int) -> float:
    """The value of an F8_E4M3 code, from its bits as text."""
    bits = f"{code:08b}"
    sign, exponent, mantissa = -1.0 if bits[0] == "1" else 1.0, int(bits[1:5], 2), int(bits[5:], 2)
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


# Even codes first: the first of two equally near ones is the even one. 127 is NaN.
_CODES = np.array([*range(0, 127, 2), *range(1, 127, 2)], np.uint8)
_MAGNITUDES = np.array([e4m3_value(int(code)) for code in _CODES], np.float32)


def nearest_e4m3(values: Array) -> bytes:
    """The codes nearest to float32 values, ties to the even code, saturating."""
    distances = np.abs(np.abs(values.reshape(-1, 1)) - _MAGNITUDES)
    codes = _CODES[distances.argmin(axis=1)]
    return bytes(codes | np.where(values.ravel() < 0, 128, 0).astype(np.uint8))


def declaration(made: Made) -> dict[str, Any]:
    """The quantization_config."""
    if made.layout == "quark":
        return _quark_declaration(made)
    if made.layout == "modelopt":
        return _modelopt_declaration(made)
    args = {"symmetric": True, "group_size": None, "actorder": None, "block_structure": None}
    bits = {"num_bits": 4, "type": "int"} if made.dtype == "int4" else _FP8
    form = "pack-quantized" if made.dtype == "int4" else "float-quantized"
    inputs: Mapping[str, Any] | None = None
    if made.activations != "none":
        dynamic = made.activations == "dynamic"
        inputs = args | _FP8 | {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    weights = args | bits | {"strategy": made.granularity, "dynamic": False, "observer": "minmax"}
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


_FP8 = {"num_bits": 8, "type": "float"}


def _quark_declaration(made: Made) -> dict[str, Any]:
    """As printed by Quark 0.13 (reference/quark.md section 2)."""
    common: dict[str, Any] = {
        "block_size": None, "enable_buffer_reuse": False, "group_size": None, "is_dynamic": False,
        "is_scale_quant": False, "max_input_numel": 4194304, "mx_element_dtype": None,
        "observer_cls": "PerChannelMinMaxObserver", "round_method": "half_even",
        "scale_calculation_mode": None, "scale_format": None, "scale_type": "float",
        "symmetric": True, "zero_point_type": "int32", "qscheme": "per_channel",
    }  # fmt: skip
    channel = made.granularity == "channel"
    weight = common | {"dtype": "int4" if made.dtype == "int4" else "fp8_e4m3",
                       "qscheme": "per_channel" if channel else "per_tensor",
                       "ch_axis": 0 if channel else None}  # fmt: skip
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


def _modelopt_declaration(made: Made) -> dict[str, Any]:
    excludes = {"exclude_modules": EXCLUDES, "ignore": EXCLUDES}
    both = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quant_method": "modelopt"}
    if made.granularity == "channel":
        return both | excludes | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    args = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": args, "targets": ["Linear"], "weights": args}
    return both | excludes | {"quant_algo": "FP8", "config_groups": {"group_0": group}}
