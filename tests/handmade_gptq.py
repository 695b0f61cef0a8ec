"""GPTQ folders made by hand, slow and obvious: each number is a list of bits."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from handmade import LINEARS
from tiny import Stored, read_tensors, store, values_of, write_tensors

Array = npt.NDArray[Any]


def packed(numbers: Array, bits: int) -> Array:
    """Along the first axis, one number behind the other: [count, n] -> [words, n] int32."""
    single = (numbers[:, None].astype(np.int64) >> np.arange(bits)[:, None]) & 1
    stream = single.reshape(-1, numbers.shape[1])
    stream = np.pad(stream, ((0, -len(stream) % 32), (0, 0)))
    weights = np.int64(1) << np.arange(32)[:, None]
    words = (stream.reshape(-1, 32, numbers.shape[1]) * weights).sum(1)
    return words.astype(np.uint32).view(np.int32)


def declared_gptq(**changes: Any) -> dict[str, Any]:
    """As GPTQModel writes it."""
    plain = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    more = {"lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {}}
    return {**plain, **more, **changes}


def gptq_folder(source: Path, out: Path, **changes: Any) -> Path:
    """Every linear of a draft rounded to nearest and packed; `changes` are of the declaration."""
    declared = declared_gptq(**changes)
    shutil.copytree(source, out)
    rng, tensors = np.random.default_rng(5), {}
    for name, tensor in read_tensors(source).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LINEARS:
            parts = _linear(values_of(tensor), declared, rng)
            tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        else:
            tensors[name] = tensor
    write_tensors(out, tensors, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = declared
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def _linear(w: Array, declared: dict[str, Any], rng: np.random.Generator) -> dict[str, Stored]:
    rows, columns = w.shape
    bits, size = declared["bits"], declared["group_size"]
    size, top = columns if size == -1 else size, 2**bits - 1
    order = rng.permutation(columns) if declared["desc_act"] else np.arange(columns)
    groups = np.empty(columns, np.int32)
    groups[order] = np.arange(columns) // size
    count = -(-columns // size)
    scales, zeros = np.empty((count, rows), np.float32), np.empty((count, rows), np.float32)
    codes = np.empty(w.shape)
    for group in range(count):
        part = w[:, groups == group]
        low, high = part.min(1).clip(max=-1e-3), part.max(1).clip(min=1e-3)
        scale = 2 * np.maximum(-low, high) / top if declared["sym"] else (high - low) / top
        scale = scale.astype(np.float16).astype(np.float32)
        zero = np.full(rows, 2 ** (bits - 1)) if declared["sym"] else np.rint(-low / scale)
        scales[group], zeros[group] = scale, zero.clip(1, top)
        codes[:, groups == group] = np.rint(part / scale[:, None]) + zeros[group][:, None]
    stored = zeros - (declared["checkpoint_format"] == "gptq")
    words = {
        "qweight": packed(codes.clip(0, top).T, bits),
        "qzeros": np.ascontiguousarray(packed(stored.T, bits).T),
        "g_idx": groups,
    }
    parts = {key: Stored("I32", array.shape, array.tobytes()) for key, array in words.items()}
    return {**parts, "scales": store(scales, "F16")}
