"""Tiny whole targets with an MTP layer, in several shards, unquantized or as a tool leaves them."""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tiny import Stored, edit_json, read_tensors, store, values_of, write_safetensors
from tiny_mtp import tiny_glm4_moe_mtp, tiny_mimo_mtp

SIZES: Mapping[str, Any] = {"hidden": 256, "head_dim": 64, "intermediate": 256}
LAYERS = 2
MTP = {"glm": f"model.layers.{LAYERS}", "mimo": "model.mtp_layers.0"}
_FC = ("eh_proj", "input_proj")
_QUANTIZED = re.compile(r"(.*layers\.\d+\..*(?:[qkvo]|gate|up|down)_proj)\.weight")


def tiny_target(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """Write a BF16 target of two decoder layers and an MTP layer: "glm", or "mimo" of dense layers.

    Names of each layer and each table are spread over the shards in turn.
    """
    scratch = folder.with_name(f"{folder.name}-layer")
    if kind == "glm":
        tiny_glm4_moe_mtp(scratch, number=LAYERS, moe_intermediate=128, seed=seed, **SIZES)
    else:
        config = {"num_hidden_layers": LAYERS, "model_type": "qwen2"}
        tiny_mimo_mtp(scratch, config=config, seed=seed, **SIZES)
    layer, config = read_tensors(scratch), json.loads((scratch / "config.json").read_text())
    if kind == "glm":
        config["first_k_dense_replace"] = 0
    rng = np.random.default_rng(seed + 1)
    tensors = dict(layer)
    own = [n for n in layer if n.startswith(MTP[kind]) and ("self_attn" in n or "mlp" in n)]
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    for number in range(LAYERS):
        for name in (*own, *(f"{MTP[kind]}.{norm}" for norm in norms)):
            values = values_of(layer[name])
            noise = 0.5 + rng.random(values.shape, dtype=np.float32)
            tensors[name.replace(MTP[kind], f"model.layers.{number}")] = store(
                values * noise, layer[name].dtype
            )
    tensors["model.norm.weight"] = layer[f"{MTP[kind]}.input_layernorm.weight"]
    if kind == "glm":
        tensors["model.embed_tokens.weight"] = layer[f"{MTP[kind]}.embed_tokens.weight"]
        tensors["lm_head.weight"] = layer[f"{MTP[kind]}.shared_head.head.weight"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    write_shards(folder, tensors, 3)
    return folder


def write_shards(folder: Path, tensors: Mapping[str, Stored], shards: int) -> None:
    """The tensors, sorted, in runs over so many files, with their index."""
    names = sorted(tensors)
    files: dict[str, list[str]] = {}
    for i, name in enumerate(names):
        number = i * shards // len(names) + 1
        files.setdefault(f"model-{number:05}-of-{shards:05}.safetensors", []).append(name)
    for file, members in files.items():
        own = {name: tensors[name] for name in members}
        write_safetensors(folder / file, own, {"format": "pt"})
    index = {
        "metadata": {
            "total_size": sum(len(tensor.data) for tensor in tensors.values()),
            "total_parameters": 12345,
        },
        "weight_map": {name: file for file, members in files.items() for name in members},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def quantized_target(plain: Path, folder: Path, form: str, *, drops: bool = True) -> Path:
    """A target as a quantizer leaves it: its decoder layers in a format, its MTP layer dropped.

    Args:
        plain: of `tiny_target`.
        folder: to create.
        form: of `FORMS`.
        drops: the MTP layer is not in it; else it stays BF16.
    """
    tensors = read_tensors(plain)
    (mtp,) = {f"{p}." for p in MTP.values() for fc in _FC if f"{p}.{fc}.weight" in tensors}
    declared, become = FORMS[form]
    found: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        weight = _QUANTIZED.fullmatch(name)
        if name.startswith(mtp):
            if not drops:
                found[name] = tensor
        elif weight and become is not None:
            found |= become(weight[1], tensor)
        else:
            found[name] = tensor
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes((plain / file).read_bytes())
    if declared:
        edit_json(folder / "config.json", quantization_config=declared)
    if drops:
        edit_json(folder / "config.json", num_nextn_predict_layers=0)
    write_shards(folder, found, 3)
    return folder


def _fp8(module: str, weight: Stored, scale: Any, **stored: Any) -> dict[str, Stored]:
    """Codes of FP8 under a scale, and scales in float32 by suffix."""
    import torch

    values = torch.from_numpy(values_of(weight) / scale).to(torch.float8_e4m3fn)
    codes = values.view(torch.uint8).numpy().tobytes()
    scales = {f"{module}.{suffix}": store(np.array(x), "F32") for suffix, x in stored.items()}
    return {f"{module}.weight": Stored("F8_E4M3", weight.shape, codes), **scales}


def _fp8_channel(module: str, weight: Stored, *, flat: bool = False) -> dict[str, Stored]:
    scale = np.float32(np.abs(values_of(weight)).max(axis=1, keepdims=True) / 448)
    return _fp8(module, weight, scale, weight_scale=scale.reshape(-1) if flat else scale)


def _int4_group(module: str, weight: Stored) -> dict[str, Stored]:
    rows, columns = weight.shape
    values = values_of(weight).reshape(rows, -1, 128)
    scale = np.abs(values).max(axis=2, keepdims=True) / 7.5
    codes = (np.clip(np.rint(values / scale), -8, 7) + 8).astype(np.uint32).reshape(rows, -1, 8)
    words = (codes << (4 * np.arange(8, dtype=np.uint32))).sum(axis=2, dtype=np.uint32)
    shape = np.array([rows, columns], np.int64)
    return {
        f"{module}.weight_packed": Stored("I32", words.shape, words.tobytes()),
        f"{module}.weight_scale": store(scale[:, :, 0], "BF16"),
        f"{module}.weight_shape": Stored("I64", (2,), shape.tobytes()),
    }


def _ct(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """As llm-compressor writes it: the head by name, routers by a pattern."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs,
             "output_activations": None}  # fmt: skip
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _args(bits: int, kind: str, strategy: str, *, dynamic: bool = False, size: int | None = None):  # type: ignore[no-untyped-def]
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True,
            "dynamic": dynamic, "group_size": size}  # fmt: skip


_TOKEN = _args(8, "float", "token", dynamic=True)
_SPEC = {"dtype": "fp8_e4m3", "is_dynamic": False, "symmetric": True, "qscheme": "per_channel",
         "ch_axis": 0, "group_size": None, "scale_type": "float32"}  # fmt: skip
FORMS: Mapping[str, Any] = {
    "bf16": ({}, None),
    "ct-fp8": (_ct("float-quantized", _args(8, "float", "channel"), _TOKEN), _fp8_channel),
    "ct-int4": (_ct("pack-quantized", _args(4, "int", "group", size=128), None), _int4_group),
    "quark-fp8": ({
        "quant_method": "quark", "quant_mode": "eager_mode", "version": "0.13",
        "algo_config": None, "exclude": ["lm_head", "re:.*mlp.gate$"],
        "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
                   "weight_format": "real_quantized", "weight_merge_groups": None},
        "global_quant_config": {
            "bias": None, "output_tensors": None, "target_device": None, "weight": _SPEC,
            "input_tensors": _SPEC | {"is_dynamic": True, "ch_axis": 1},
        },
        "kv_cache_post_rope": False, "kv_cache_quant_config": {}, "layer_quant_config": {},
        "layer_type_quant_config": {}, "softmax_quant_spec": None,
    }, partial(_fp8_channel, flat=True)),
}  # fmt: skip
"""Name -> quantization_config, and what a weight becomes."""
