"""Folders in which many things are wrong at once, and every word that is said of each.

A fault that is found no more, or otherwise, is a line that differs.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from by_recipe import quantized
from cuts import cut
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.provenance import GraftedProvenance
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.quantize.making.dequantize_draft import dequantize_draft
from draftquant.quantize.making.transcode_draft import plan_transcoding, transcode_draft
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from draftquant.quantize.verify.comparison import Compared
from draftquant.quantize.verify.graft_verification import verify_graft
from draftquant.quantize.verify.rewritten import verify_dequantized, verify_transcoded
from draftquant.recipes import Algorithm, KvCacheFormat, Recipe, WeightFormat, load_recipe
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from mixes import FP8_STATIC, INT4_CHANNEL, mixed
from tiny import (
    INDEX_FILE,
    Stored,
    edit_json,
    read_tensors,
    store,
    tiny_eagle3_llama,
    values_of,
    write_tensors,
)
from tiny_target import MTP, quantized_target, tiny_target
from weight_formats import FP8_BLOCK, PER_GROUP, TWO_STAGES

SIDE = "hf_quant_config.json"
Tensors = dict[str, Stored]
PYTORCH = {"format": "pt"}
CODES = ("weight", "weight_packed", "qweight")
SCALES = ("weight_scale", "weight_scale_inv", "scales", "weight_scale_2", "weight_global_scale")


def _recipe(name: str, weights: WeightFormat | None = None, **changes: Any) -> Recipe:
    base = load_recipe(name)
    return replace(base, weights=weights or base.weights, **changes)


CACHE = KvCacheFormat(dtype="fp8_e4m3", scales="unit")
RECIPES: dict[str, Recipe] = {
    "int4 with a cache": _recipe("int4-channel", kv_cache=CACHE),
    "two stages": _recipe("mi325x-w4a8", TWO_STAGES),
    "nvfp4": load_recipe("blackwell-nvfp4"),
    "fp8 of matrices": load_recipe("blackwell-fp8"),
    "fp8 of blocks": _recipe("fp8-ptpc", FP8_BLOCK, layout="fp8", activations=PER_GROUP),
    "awq": load_recipe("mi325x-int4-awq"),
    "mixed": mixed(FP8_STATIC, (INT4_CHANNEL, ("*.down_proj.weight",))),
}


WITH_HEAD = _recipe(
    "int4-channel-gptq-head", algorithm=Algorithm(scale="absmax", rounding="nearest")
)


# ---- What goes wrong in a linear: each linear has another damage


class Linear(NamedTuple):
    """One linear of a folder's tensors, and the names of its codes and scales."""

    tensors: Tensors
    module: str
    codes: str
    scale: str


def flipped(tensors: Tensors, name: str, byte: int, bits: int) -> None:
    data = bytearray(tensors[name].data)
    data[byte] ^= bits
    tensors[name] = tensors[name]._replace(data=bytes(data))


def times(tensors: Tensors, name: str, index: int, factor: float) -> None:
    tensor = tensors[name]
    if tensor.dtype in ("F8_E4M3", "U8"):
        flipped(tensors, name, index, 0x08)
        return
    values = values_of(tensor).copy().reshape(-1)
    index = min(index, len(values) - 1)
    values[index] *= np.float32(factor)
    bits = store(values, tensor.dtype)
    if tensor.dtype == "BF16" and not np.isfinite(values[index]):
        words = np.frombuffer(bits.data, np.uint16).copy()
        words[index] = 0x7FC0 if np.isnan(values[index]) else 0x7F80
        bits = bits._replace(data=words.tobytes())
    tensors[name] = tensor._replace(data=bits.data)


def other_dtype(tensors: Tensors, name: str) -> None:
    tensor = tensors[name]
    if tensor.dtype in ("BF16", "F16", "F32"):
        other = "F32" if tensor.dtype != "F32" else "BF16"
        tensors[name] = store(values_of(tensor), other)._replace(shape=tensor.shape)
    else:
        other = "I8" if tensor.dtype == "U8" else "U8"
        tensors[name] = tensor._replace(dtype=other, shape=(len(tensor.data),))


BESIDE = (
    "weight_shape", "weight_zero_point_2", "weight_zero_point", "qzeros", "input_scale",
    "weight_scale_2", "input_global_scale", "weight_global_scale",
)  # fmt: skip


def _beside(at: Linear) -> None:
    for name in (f"{at.module}.{suffix}" for suffix in BESIDE):
        if name in at.tensors:
            flipped(at.tensors, name, 0, 0x11)


def _both_ends(at: Linear) -> None:
    flipped(at.tensors, at.codes, 0, 1)
    flipped(at.tensors, at.codes, -1, 8)


LINEARS: dict[str, Callable[[Linear], object]] = {
    "a code": lambda at: flipped(at.tensors, at.codes, len(at.tensors[at.codes].data) // 2, 0x44),
    "a scale twice as large": lambda at: times(at.tensors, at.scale, 1, 2.0),
    "a scale of NaN": lambda at: times(at.tensors, at.scale, 2, np.nan),
    "no scale": lambda at: at.tensors.pop(at.scale),
    "another dtype": lambda at: other_dtype(at.tensors, at.scale),
    "one more": lambda at: at.tensors.update(
        {f"{at.module}.weight_g_idx": at.tensors["norm.weight"]}
    ),
    "no codes": lambda at: at.tensors.pop(at.codes),
    "scales of zero and below": lambda at: [
        times(at.tensors, at.scale, index, by) for index, by in enumerate((0.0, -1.0))
    ],
    "a scale a little larger": lambda at: times(at.tensors, at.scale, 1, 1.02),
    "first and last code": _both_ends,
    "beside": _beside,
}


def of_linears(tensors: Tensors, first: int) -> Iterator[str]:
    """Damage every linear."""
    found = sorted({n.rpartition(".")[0] for n in tensors if n.endswith(SCALES) and "_proj." in n})
    found = [m for m in found if any(f"{m}.{suffix}" in tensors for suffix in SCALES[:3])]
    for module, kind in zip(found, cycle([*LINEARS][first:] + [*LINEARS][:first]), strict=False):
        codes = next(f"{module}.{s}" for s in CODES if f"{module}.{s}" in tensors)
        scale = next(f"{module}.{s}" for s in SCALES if f"{module}.{s}" in tensors)
        LINEARS[kind](Linear(tensors, module, codes, scale))
        yield f"{module}: {kind}"


def in_kept(tensors: Tensors, first: int) -> None:
    """Damage what is kept."""
    if first % 2:
        flipped(tensors, "d2t", 3, 1)
        fc = tensors["fc.weight"]
        tensors["fc.weight"] = fc._replace(shape=fc.shape[::-1])
        tensors["lm_head.weight_scale"] = tensors["norm.weight"]
    else:
        flipped(tensors, "t2d", 40, 1)
        flipped(tensors, "fc.weight", -1, 0x80)
        del tensors["norm.weight"]
        times(tensors, "lm_head.weight", 5, np.inf)
        tensors["extra.weight"] = tensors["d2t"]


# ---- and in the documents and files beside it


def _edited(folder: Path, name: str, change: Callable[[Any], object]) -> None:
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def _config(config: Any) -> None:
    config |= {"rope_theta": 1.0, "new": [1]}
    del config["rms_norm_eps"]
    declared = config["quantization_config"]
    for key in ("ignore", "exclude", "exclude_modules", "ignored_layers", "modules_to_not_convert"):
        if key in declared:
            declared[key] = [*declared[key][1:], "*up_proj*"]
    declared.pop("kv_cache_scheme", None)
    if "producer" in declared:
        declared["producer"] = 1


def _record(record: Any) -> None:
    digests = [record["tensor_digests"], record["source"]["tensor_digests"]]
    for said, few in zip(digests, (4, 2), strict=True):
        for name in sorted(said)[:few]:
            said[name] = "blake3:" + "0" * 64
    record["source"]["family"] = "another"
    for number, module in enumerate(sorted(record.get("input_scales") or ())):
        if number in (0, 1):
            del record["input_scales"][module]
        elif number == 2:
            record["input_scales"][module] *= 2
    record["tensor_bytes"] = {"before": 1, "after": 2}


def in_files(out: Path) -> None:
    """Everything else that can be wrong."""
    _edited(out, "config.json", _config)
    if (out / SIDE).is_file():
        excludes = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
        _edited(out, SIDE, lambda side: side["quantization"].update(exclude_modules=excludes))
    _edited(out, "draftquant.json", _record)
    (out / "tokenizer.json").write_text('{"version": "1.0"}\n\n', encoding="utf-8")
    (out / "notes.txt").write_text("x", encoding="utf-8")
    (out / "tokenizer_config.json").unlink()
    for folder, file in ((".git", "HEAD"), ("a", "b.txt"), (".cache/huggingface", "x")):
        (out / folder).mkdir(parents=True)
        (out / folder / file).write_text("x", encoding="utf-8")
    (out / "link").symlink_to("notes.txt")


# ---- what is said


def said(of: object, folder: Path) -> str:
    """Without paths of this run, and with every digest alike."""
    text = str(of).replace(str(folder), "")
    return re.sub(r"\b[0-9a-f]{64}\b", "#", text).replace(version("draftquant"), "VERSION")


def linears(found: Any) -> list[list[Any]]:
    """What was measured, in few digits: the last ones are those of a machine's sums."""
    return [
        [x.module, x.wrong_codes, str(x.max_error)[:5], f"{x.relative_l2_error:.3g}", x.found]
        for x in found
    ]


def report(folder: Path, out: Path, source: Path | None = None, **how: Any) -> dict[str, Any]:
    """What `verify` says."""
    read = list[tuple[int, int]]()
    try:
        found = verify(out, source or folder / "draft", lambda *of: read.append(of), **how)
    except CheckpointError as exc:
        return {"refused": said(exc, folder)}
    left = {k: v for k, v in found.to_mapping().items() if k not in ("faults", "linears")}
    names = {k: sorted(v) for k, v in left.items() if k.endswith("_digests")}
    brief = {key: said(value, folder) for key, value in found.brief().items()}
    values = {k: said(v, folder) if isinstance(v, str) else v for k, v in left.items()} | names
    faults = [said(fault, folder) for fault in found.faults]
    shown = {"brief": brief, "read": [read == sorted(read), read[-1:]]}
    return {"faults": faults, "linears": linears(found.linears), **values, **shown}


def audited(folder: Path, out: Path) -> dict[str, Any]:
    """What `inspect` says."""
    try:
        found = audit_checkpoint(Checkpoint.open(out)).to_mapping()
    except CheckpointError as exc:
        return {"refused": said(exc, folder)}
    faults = [said(": ".join(fault.values()), folder) for fault in found.pop("faults")]
    for linear in found["linears"]:
        linear["tensors"] = [" ".join(map(str, one.values())) for one in linear["tensors"]]
    return {**found, "draft": "", "faults": faults, "made_by": said(found["made_by"], folder)}


def scene(folder: Path, recipe: Recipe, first: int) -> dict[str, Any]:
    """A folder as it should be, and damaged."""
    sizes = {"hidden": 128, "intermediate": 256, "heads": 2, "kv_heads": 1, "head_dim": 64}
    draft = tiny_eagle3_llama(folder / "draft", pruned_vocabulary=True, vocab=64, **sizes)
    out = quantized(draft, recipe, folder / "out").out
    found = {"sound": report(folder, out), "sound, by itself": audited(folder, out)}
    if (out / SIDE).is_file():
        found["side file"] = dict(side_files(folder, out))
    if recipe.kv_cache:
        found["cache"] = dict(of_cache(folder, out))
    tensors = read_tensors(out)
    kinds = list(of_linears(tensors, first))
    write_tensors(out, tensors, metadata={"format": "np", "more": "x"})
    found["damaged, by itself"] = audited(folder, out)
    in_kept(tensors, first)
    write_tensors(out, tensors, metadata={"format": "np", "more": "x"})
    in_files(out)
    found["damaged"] = report(folder, out)
    edit_json(out / "config.json", rope_theta=10000.0)
    (out / "draftquant.json").unlink()
    found["somebody else's"] = report(folder, out, foreign=True)
    (out / "model.safetensors").unlink()
    found["no weights"] = report(folder, out, foreign=True)["refused"]
    return {"damages": kinds, **found}


def of_cache(folder: Path, out: Path) -> Iterator[tuple[str, list[str]]]:
    """What is said of scales of a cache that are not recorded, of no layer, or stored otherwise."""
    record, tensors = (out / "draftquant.json").read_text(encoding="utf-8"), read_tensors(out)
    name = next(name for name in tensors if name.endswith("k_scale"))
    for what, scales, stored in (
        ("not recorded", {}, tensors),
        ("of no layer", {"x": 1.0}, tensors),
        ("in BF16", None, tensors | {name: store(np.ones(1, np.float32), "BF16")}),
        ("not stored", None, {other: tensor for other, tensor in tensors.items() if other != name}),
    ):
        if scales is not None:
            _edited(out, "draftquant.json", lambda said, new=scales: said.update(cache_scales=new))
        write_tensors(out, stored, metadata=PYTORCH)
        yield what, report(folder, out)["faults"]
        (out / "draftquant.json").write_text(record, encoding="utf-8")
    write_tensors(out, tensors, metadata=PYTORCH)


def side_files(folder: Path, out: Path) -> Iterator[tuple[str, str]]:
    """What is said of ModelOpt's second declaration where it says something else."""
    sound = (out / SIDE).read_text(encoding="utf-8")
    changes: list[dict[str, Any]] = [
        {"quant_algo": "W8A8"}, {"kv_cache_quant_algo": "FP8"}, {"group_size": 7}, {"x": 1},
        {"exclude_modules": ["*a*"]}, {"exclude_modules": "a"}, {},
    ]  # fmt: skip
    for change in changes:
        side = json.loads(sound)
        side["quantization"].update(change)
        side.update({} if change else {"y": 1})
        (out / SIDE).write_text(json.dumps(side), encoding="utf-8")
        yield str(change), report(folder, out)["faults"]
    (out / SIDE).write_text(sound, encoding="utf-8")


WRONG_IDS = (("outside", -1, 55), ("below", 0, -5), ("twice", 3, -1), ("stranger", 0, -1))
"""What is wrong with the token of a draft id, and by how much."""


def cut_scene(folder: Path) -> dict[str, Any]:
    """A quantized draft whose vocabulary was cut, held against both that it was made from."""
    draft = tiny_eagle3_llama(folder / "draft", pruned_vocabulary=True)
    whole = quantized(draft, WITH_HEAD, folder / "whole").out
    out = folder / "out"
    cut(whole, out, (4, 5, 7, 8, 9, 12, 15, 17, 19, 20, 21, 22, 25, 28, 29, 30, 34, 35, 38, 41))
    sides = (draft, whole)
    found: dict[str, Any] = {"sound": [report(folder, out, source) for source in sides]}
    found["sound, by itself"] = audited(folder, out)["made_by"]
    other = tiny_eagle3_llama(folder / "other", pruned_vocabulary=True, seed=1)
    found["of another"] = report(folder, out, other)["faults"]
    sound = read_tensors(out)
    for name, index, value in WRONG_IDS:
        ids = np.frombuffer(sound["d2t"].data, "<i8").copy()
        ids[index] += value
        data = ids.tobytes()
        write_tensors(out, sound | {"d2t": sound["d2t"]._replace(data=data)}, metadata=PYTORCH)
        found[name] = [said(f, folder) for source in sides for f in verify(out, source).faults]
    tensors = dict(sound)
    bytes_of = {"lm_head.weight_packed": 300, "t2d": 50, "fc.weight": 7, "norm.weight": 0}
    for name, byte in bytes_of.items():
        flipped(tensors, name, byte, 1)
    times(tensors, "midlayer.mlp.up_proj.weight_scale", 1, 2.0)
    write_tensors(out, tensors, metadata={"format": "np"})

    def change(record: Any) -> None:
        record["cuts"][0].update(size=21, size_before=95, vocabulary=97)
        record["tensor_digests"]["norm.weight"] = "blake3:" + "1" * 64

    _edited(out, "draftquant.json", change)
    _edited(out, "config.json", lambda config: config.update(rope_theta=1.0))
    (out / "notes.txt").write_text("x", encoding="utf-8")
    found["damaged"] = [report(folder, out, source) for source in sides]
    write_tensors(out, tensors | {"extra": tensors["d2t"]}, metadata=PYTORCH)
    found["one more"] = [said(f, folder) for source in sides for f in verify(out, source).faults]
    return found


def grafted(folder: Path) -> dict[str, Any]:
    """A target with a layer put in."""
    tiny_target(folder / "plain", "mimo")
    target = quantized_target(folder / "plain", folder / "target", "ct-fp8")
    layer, out, subtree = folder / "layer", folder / "out", MTP["mimo"]
    how = ["--subtree", subtree, "--recipe", "fp8-ptpc", "--quiet"]
    assert main(["quantize", str(folder / "plain"), "--out", str(layer), *how]) == 0
    assert main(["graft", str(target), str(layer), "--out", str(out), "--quiet"]) == 0
    record = read_provenance(out)
    assert isinstance(record, GraftedProvenance)

    def compared(of: str | None) -> dict[str, Any]:
        own = Checkpoint.open(folder / of) if of else None
        read = list[int]()
        how: Any = {"layer": own, "record": record, "on_progress": read.append}
        found = verify_graft(out, target, record.layers, **how)
        faults = [said(fault, folder) for fault in found.faults]
        values = found.to_mapping() | {"output": "", "target": "", "faults": faults}
        digests = [sorted(found.header_digests), sorted(found.layer_digests)]
        rest = {"digests": digests, "read": sum(read), "brief": list(found.brief().items())}
        return {**values, **rest}

    found: dict[str, Any] = {"sound": [compared(None), compared("layer")]}
    for number, file in enumerate(sorted(out.glob("*.safetensors"))):
        content = bytearray(file.read_bytes())
        content[-1 - number] ^= 1
        file.unlink()
        file.write_bytes(content)
    index = json.loads((out / INDEX_FILE).read_text(encoding="utf-8"))
    index["metadata"]["total_size"] += 1
    (out / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    _edited(out, "config.json", lambda config: config.update(rope_theta=1.0, new=1))
    _edited(out, "config.json", _declared_otherwise)
    (out / "notes.txt").write_text("x", encoding="utf-8")
    (out / "tokenizer.json").write_text("{}", encoding="utf-8")
    digests = dict.fromkeys(record.tensor_digests, "blake3:0")
    record = replace(record, tensor_digests=digests, sha256="0" * 64)
    found["damaged"] = [compared(None), compared("layer")]
    tensors = read_tensors(layer)
    for file in layer.glob("model*.safetensors*"):
        file.unlink()
    norm = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[f"{subtree}.more.weight"] = tensors[norm]
    tensors[norm] = tensors[norm]._replace(dtype="F16")
    del tensors[f"{subtree}.token_layernorm.weight"]
    write_tensors(layer, tensors, metadata=PYTORCH)
    found["another layer"] = compared("layer")["faults"]
    _edited(out, "config.json", lambda config: config.update(quantization_config=1))
    found["no declaration"] = compared(None)["faults"]
    edit_json(target / "config.json", quantization_config=1)
    found["of neither"] = compared(None)["faults"]
    (out / "config.json").unlink()
    found["unreadable"] = compared(None)["faults"]
    return found


def _declared_otherwise(config: Any) -> None:
    declared = config["quantization_config"]
    declared["ignore"].append("re:.*layers.0.*up_proj")
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    declared["kv_cache_scheme"] = {**cache, "dynamic": False}


def rewritten(folder: Path) -> dict[str, Any]:
    """A folder in another layout, and one of plain weights."""
    draft = tiny_eagle3_llama(folder / "draft", hidden=128, intermediate=256, dtype="F16")
    whole = quantized(draft, RECIPES["fp8 of matrices"], folder / "whole").out
    source, found = StoredDraft.read(Checkpoint.open(whole)), dict[str, Any]()
    plan = plan_transcoding(DraftSource(folder=whole), "quark", None, target_layers=4)
    transcode_draft(plan, folder / "out")
    dequantize_draft(DraftSource(folder=whole), folder / "plain", dtype=None)
    compare: dict[str, Callable[[Path], Compared]] = {
        "out": lambda out: verify_transcoded(source, out),
        "plain": lambda out: verify_dequantized(source, out, "F16"),
    }
    for name, verified in compare.items():
        out, both = folder / name, list[Any]()
        found[f"{name}, by itself"] = audited(folder, out)
        for change in (None, _damage_rewritten, in_rewritten_files):
            if change is not None:
                change(out)
            own = verified(out)
            lost = [[x.elements, x.rounded, x.max_relative_difference] for x in own.dequantized]
            digests = sorted(own.source_digests), sorted(own.output_digests)
            faults = [said(fault, folder) for fault in own.faults]
            both.append({"faults": faults, "lost": lost, "digests": digests, "scheme": own.scheme})
        found[name] = both
    found["against the draft"] = report(folder, folder / "out")
    return found


def _damage_rewritten(out: Path) -> None:
    tensors = read_tensors(out)
    names = sorted(name for name in tensors if ".mlp." in name or "o_proj" in name)
    for number, name in enumerate(name for name in names if not name.endswith("shape")):
        if tensors[name].dtype == "F32":
            tensors[name] = store(values_of(tensors[name]) * np.float32(1 + number / 8), "F32")
        else:
            flipped(tensors, name, 8 * number + 1, 0x11)
    flipped(tensors, "fc.weight", 5, 4)
    write_tensors(out, tensors, metadata=PYTORCH)


def in_rewritten_files(out: Path) -> None:
    """Documents of another draft."""
    _edited(out, "config.json", lambda config: config.update(rope_theta=1.0))
    if "quantization_config" in (out / "config.json").read_text(encoding="utf-8"):
        declared = json.loads((out / "config.json").read_text(encoding="utf-8"))
        declared["quantization_config"]["global_quant_config"]["input_tensors"]["is_dynamic"] = True
        edit_json(out / "config.json", **declared)
        left = {n: t for n, t in read_tensors(out).items() if not n.endswith("input_scale")}
        write_tensors(out, left, metadata=PYTORCH)
    (out / "notes.txt").write_text("x", encoding="utf-8")
