"""Folders as other tools write them, by hand: their own rules of scales, codes and excludes.

`handmade` names and packs; here is what tools do otherwise than this package.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from handmade import LINEARS, MADE, Made, quantize_by_hand, stored_parts
from handmade_numbers import Rounded, codes_under, covered, spread
from tiny import edit_json, read_tensors, store, tiny_eagle3_llama, values_of, write_tensors
from tiny_llama import tiny_language_model
from verify_cases import edit_declaration

Array = npt.NDArray[Any]
Scales = Callable[[Array, Made], Array]
PYTORCH = {"format": "pt"}
SIZES = {"hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 32}


def eagle3(folder: Path) -> Path:
    return tiny_eagle3_llama(folder, **SIZES, vocab=96)


def language_model(folder: Path) -> Path:
    return tiny_language_model(folder, hidden=128, intermediate=256)


def by_seven(w: Array, made: Made) -> Array:
    """absmax / 7: AutoAWQ, GPTQModel, ModelOpt."""
    return covered(w, made.dtype, made.granularity) / np.float32(7)


def by_seven_and_a_half(w: Array, made: Made) -> Array:
    return covered(w, made.dtype, made.granularity) / np.float32(7.5)


def searched(w: Array, made: Made) -> Array:
    """Of each row or group the scale with the least square error, from 0.5 to 1 of absmax / 7.5."""
    largest = by_seven_and_a_half(w, made)
    best, least = largest, np.full(largest.shape, np.inf)
    size = w.shape[1] // largest.shape[1]
    for share in np.linspace(0.5, 1, 26, dtype=np.float32):
        scale = values_of(store(largest * share, scale_dtype(made)))
        codes = codes_under(w, made.dtype, made.granularity, scale, None)
        lost = (w - codes * spread(scale, made.dtype, made.granularity, w.shape)) ** 2
        lost = lost.reshape(len(w), -1, size).sum(2)
        best, least = np.where(lost < least, scale, best), np.minimum(lost, least)
    return best


def scale_dtype(made: Made) -> str:
    return "F16" if made.layout == "awq" else "BF16"


def compensated(w: Array, scale: Array, made: Made) -> Array:
    """GPTQ's codes: each column's error is made up for by the columns after it."""
    width = w.shape[1]
    rng = np.random.default_rng(1)
    mixing = rng.standard_normal((width, width // 4)) @ rng.standard_normal((width // 4, width))
    x = mixing + rng.standard_normal((width, width)) * 2
    hessian = x.T @ x
    hessian += 0.01 * np.trace(hessian) / width * np.eye(width)
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    wide = np.broadcast_to(spread(scale, made.dtype, made.granularity, w.shape), w.shape)
    left, codes = w.astype(np.float64).copy(), np.zeros(w.shape, int)
    for i in range(width):
        codes[:, i] = np.clip(np.rint(left[:, i] / wide[:, i]), -8, 7)
        error = (left[:, i] - codes[:, i] * wide[:, i]) / upper[i, i]
        left[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
    return codes


def int4(made: Made, scales: Scales, *, gptq: bool = False) -> Callable[[Path, Path], None]:
    def change(source: Path, out: Path) -> None:
        weights, tensors = read_tensors(source), read_tensors(out)
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] not in LINEARS:
                continue
            w = values_of(weight)
            scale = values_of(store(scales(w, made).astype(np.float32), scale_dtype(made)))
            plain = codes_under(w, made.dtype, made.granularity, scale, None)
            codes = compensated(w, scale, made) if gptq else plain
            parts = stored_parts(Rounded(codes, scale), weight.dtype, made)
            tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in parts.items()}
        write_tensors(out, tensors, metadata=PYTORCH)

    return change


def as_it_is(_source: Path, _out: Path) -> None:
    return


def whole_scales(_source: Path, out: Path) -> None:
    """One scale per matrix, as transformers wrote plain fp8 before blocks."""

    def renamed(name: str) -> str:
        return name.replace("weight_scale_inv", "weight_scale")

    tensors = {renamed(name): tensor for name, tensor in read_tensors(out).items()}
    write_tensors(out, tensors, metadata=PYTORCH)
    edit_declaration(out, lambda d: d.pop("weight_block_size"))


CT_GROUP, CT_CHANNEL, AWQ = MADE["ct-int4-group"], MADE["ct-int4"], MADE["awq"]
FP8_WHOLE = Made("fp8", "fp8", "tensor", "dynamic")
KINDS: dict[str, tuple[Callable[[Path], Path], Made, Callable[[Path, Path], None]]] = {
    "plain fp8 in blocks, EAGLE-3": (eagle3, MADE["fp8-block"], as_it_is),
    "plain fp8 per tensor, language model": (language_model, FP8_WHOLE, whole_scales),
    "FP8 static, language model": (language_model, MADE["ct-fp8-static"], as_it_is),
    "FP8 dynamic, EAGLE-3": (eagle3, MADE["ct-fp8"], as_it_is),
    "ModelOpt FP8, EAGLE-3": (eagle3, MADE["modelopt-fp8"], as_it_is),
    "Quark FP8, language model": (language_model, MADE["quark-fp8"], as_it_is),
    "INT4 groups, absmax / 7": (eagle3, CT_GROUP, int4(CT_GROUP, by_seven)),
    "INT4 groups, absmax / 7.5": (eagle3, CT_GROUP, int4(CT_GROUP, by_seven_and_a_half)),
    "INT4 rows, absmax / 7": (language_model, CT_CHANNEL, int4(CT_CHANNEL, by_seven)),
    "INT4 rows, searched": (eagle3, CT_CHANNEL, int4(CT_CHANNEL, searched)),
    "AWQ, searched": (eagle3, AWQ, int4(AWQ, searched)),
    "GPTQ rows, absmax / 7": (eagle3, CT_CHANNEL, int4(CT_CHANNEL, by_seven, gptq=True)),
    "GPTQ groups, searched": (eagle3, CT_GROUP, int4(CT_GROUP, searched, gptq=True)),
}
"""By name: the draft, how it is stored, and what the tool does otherwise."""


def foreign(kind: str, folder: Path) -> tuple[Path, Path]:
    """Source and quantized folder, as a tool leaves it: no embedding and no head is listed.

    Of ModelOpt the head is, which engines would take for a quantized one.
    """
    draft, made, change = KINDS[kind]
    source = draft(folder / "source")
    out = quantize_by_hand(source, folder / "out", made)
    change(source, out)
    listed = [] if draft is language_model else ["fc", "model.fc"]
    if made.layout == "modelopt":
        listed.append("lm_head")
    keys = {
        "compressed-tensors": ("ignore",),
        "modelopt": ("ignore", "exclude_modules"),
        "quark": ("exclude",),
        "fp8": ("ignored_layers", "modules_to_not_convert"),
        "awq": ("modules_to_not_convert",),
    }[made.layout]
    edit_declaration(out, lambda d: [d.update({k: listed}) for k in keys if k in d])
    if made.layout == "modelopt":
        own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": listed}
        edit_json(out / "hf_quant_config.json", quantization=own)
    edit_json(out / "config.json", transformers_version="4.57.0")  # as save_pretrained does
    return source, out
