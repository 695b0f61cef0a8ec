"""Quantized folders made by hand: the layouts of the specification, slow and obvious, in numpy.

Nothing of the package is used here, so that neither the writing nor the reading side can be wrong
in the same way as this.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from handmade_declarations import EXCLUDES, declaration
from handmade_numbers import HALF, Dtype, Granularity, Rounded, nearest_e4m3, rounded
from tiny import Stored, fused_absmax, read_tensors, store, values_of, write_tensors

Array = npt.NDArray[Any]
ORDER = {"order": [0, 1, 2, 3, 4, 5, 6, 7], "reorder": [0, 2, 4, 6, 1, 3, 5, 7]}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Made(NamedTuple):
    """One way to quantize a folder."""

    layout: Literal["quark", "compressed-tensors", "modelopt", "fp8", "awq"]
    dtype: Dtype
    granularity: Granularity = "channel"
    activations: Literal["none", "dynamic", "static"] = "none"
    pack_method: str = "reorder"


MADE: dict[str, Made] = {
    "quark-int4": Made("quark", "int4"),
    "quark-int4-order": Made("quark", "int4", pack_method="order"),
    "quark-int4-dynamic": Made("quark", "int4", activations="dynamic"),
    "quark-int4-static": Made("quark", "int4", activations="static"),
    "quark-int4-group": Made("quark", "int4", "group"),
    "quark-fp8": Made("quark", "fp8", activations="dynamic"),
    "quark-fp8-static": Made("quark", "fp8", "tensor", "static"),
    "quark-mxfp4": Made("quark", "mxfp4", "group"),
    "ct-int4": Made("compressed-tensors", "int4"),
    "ct-int4-group": Made("compressed-tensors", "int4", "group"),
    "ct-int8": Made("compressed-tensors", "int8"),
    "ct-fp8": Made("compressed-tensors", "fp8", activations="dynamic"),
    "ct-fp8-static": Made("compressed-tensors", "fp8", "tensor", "static"),
    "ct-fp8-block": Made("compressed-tensors", "fp8", "block", "dynamic"),
    "ct-nvfp4": Made("compressed-tensors", "nvfp4", "group"),
    "ct-mxfp4": Made("compressed-tensors", "mxfp4", "group"),
    "modelopt-fp8": Made("modelopt", "fp8", "tensor", "static"),
    "modelopt-fp8-pcpt": Made("modelopt", "fp8", "channel", "dynamic"),
    "modelopt-nvfp4": Made("modelopt", "nvfp4", "group"),
    "fp8-block": Made("fp8", "fp8", "block", "dynamic"),
    "awq": Made("awq", "int4", "group"),
}


def quantize_by_hand(source: Path, out: Path, made: Made, *, share: bool = False) -> Path:
    """Quantize every attention and MLP linear of `source` into the new folder `out`.

    With `share`, linears that engines fuse get one FP8 scale, as NVFP4's always do.
    """
    shutil.copytree(source, out)
    tensors = read_tensors(source)
    quantized: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LINEARS:
            shared = share or made.dtype == "nvfp4"
            largest = fused_absmax(tensors, module) if shared else None
            quantized |= encode(module, tensor, made, largest)
        else:
            quantized[name] = tensor
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = declared = declaration(made)
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if made.layout == "modelopt":
        nested = {"quant_algo": declared["quant_algo"], "kv_cache_quant_algo": None}
        nested["exclude_modules"] = EXCLUDES
        if "group_size" in declared:
            nested["group_size"] = declared["group_size"]
        both = {"producer": {"name": "modelopt"}, "quantization": nested}
        (out / "hf_quant_config.json").write_text(json.dumps(both), encoding="utf-8")
    sharded = (source / "model.safetensors.index.json").exists()
    write_tensors(out, quantized, sharded=sharded, metadata={"format": "pt"})
    return out


def encode(module: str, weight: Stored, made: Made, largest: float | None) -> dict[str, Stored]:
    """The stored tensors of one linear; `largest` of all that it is fused with."""
    parts = stored_parts(by_hand(weight, made, largest), weight.dtype, made)
    if made.activations == "static":
        shape = (1,) if made.layout == "compressed-tensors" else ()
        parts["input_scale"] = store(np.full(shape, 0.05, np.float32), "F32")
    return {f"{module}.{suffix}": tensor for suffix, tensor in parts.items()}


def by_hand(weight: Stored, made: Made, largest: float | None = None) -> Rounded:
    """Codes and scales of one linear."""
    w, dtype = values_of(weight), "F16" if made.layout == "awq" else weight.dtype
    whole = float(np.abs(w).max()) if largest is None else largest
    return rounded(w, made.dtype, made.granularity, dtype, whole)


def stored_parts(found: Rounded, source_dtype: str, made: Made) -> dict[str, Stored]:
    """Codes and scales as a layout names and packs them."""
    if made.dtype in HALF:
        return _integer_parts(found, source_dtype, made)
    if made.dtype == "fp8":
        return _fp8_parts(found, made)
    return _fp4_parts(found, made)


def _integer_parts(found: Rounded, source_dtype: str, made: Made) -> dict[str, Stored]:
    (rows, columns), codes = found.codes.shape, found.codes
    scale, across = store(found.scale, source_dtype), store(found.scale.T.copy(), source_dtype)
    groups = found.scale.shape[1]
    if made.layout == "compressed-tensors":
        return {
            "weight_packed": pack(codes + 8, "order") if made.dtype == "int4" else octets(codes),
            "weight_scale": scale,
            "weight_shape": Stored("I64", (2,), np.array([rows, columns]).tobytes()),
        }
    zeros = Stored("I32", (groups, rows // 8), bytes(groups * rows // 8 * 4))
    if made.layout == "awq":
        return {
            "qweight": pack(codes.T + 8, "reorder"),
            "qzeros": zeros._replace(data=b"\x88" * len(zeros.data)),
            "scales": store(found.scale.T.copy(), "F16"),
        }
    if made.granularity == "group":
        return {
            "weight": pack(codes.T, made.pack_method),
            "weight_scale": across,
            "weight_zero_point": zeros,
        }
    return {
        "weight": pack(codes, made.pack_method),
        "weight_scale": scale._replace(shape=(rows,)),
        "weight_zero_point": zeros._replace(shape=(rows // 8,)),
    }


def _fp8_parts(found: Rounded, made: Made) -> dict[str, Stored]:
    rows = found.codes.shape[0]
    ours = made.layout == "compressed-tensors"
    shape: tuple[int, ...] = {
        "channel": (rows, 1) if ours else (rows,),
        "tensor": (1,) if ours else (),
        "block": found.scale.shape,
    }[made.granularity]
    suffix = "weight_scale_inv" if made.layout == "fp8" else "weight_scale"
    return {
        "weight": Stored("F8_E4M3", found.codes.shape, found.codes.astype(np.uint8).tobytes()),
        suffix: Stored("F32", shape, found.scale.tobytes()),
    }


def _fp4_parts(found: Rounded, made: Made) -> dict[str, Stored]:
    """Two codes to a byte, the even column in the low four bits."""
    stored = (found.codes[:, 0::2] | found.codes[:, 1::2] << 4).astype(np.uint8)
    ours = made.layout == "compressed-tensors"
    parts = {"weight_packed" if ours else "weight": Stored("U8", stored.shape, stored.tobytes())}
    if found.whole is None:
        exponents = (np.log2(found.scale) + 127).astype(np.uint8)
        return parts | {"weight_scale": Stored("U8", found.scale.shape, exponents.tobytes())}
    parts["weight_scale"] = Stored("F8_E4M3", found.scale.shape, nearest_e4m3(found.scale))
    if ours:
        inverse = np.array([1 / found.whole], np.float32)
        return parts | {"weight_global_scale": store(inverse, "F32")}
    return parts | {"weight_scale_2": store(np.array(found.whole), "F32")}


def octets(codes: Array) -> Stored:
    """Four codes per int32 word, each plus 128 in a byte; columns are padded with code 0."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4))) + 128
    return Stored("I32", (len(padded), padded.shape[1] // 4), padded.astype(np.uint8).tobytes())


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
    return Stored("I32", (rows, len(words) // rows), np.array(words, np.uint32).tobytes())
