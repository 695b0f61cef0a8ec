"""Scales of the KV cache in folders: written in every layout, read again, verified, carried."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant import api as dq
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.draft_cache import CacheScales
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import resolve_draft
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.making.transcode_draft import plan_transcoding, transcode_draft
from draftquant.quantize.planning.quantization_plan import MeasuredInputs, make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.rewritten import verify_transcoded
from draftquant.recipes import KvCacheFormat, Recipe, load_recipe
from draftquant.recipes.errors import CheckpointError, DraftQuantError, PlanError
from draftquant.recipes.formats import KvCacheScales
from draftquant.recipes.schema import LayoutName
from draftquant.scripts.cli import main
from tiny import Stored, edit_json, read_tensors, store, tiny_eagle3_llama
from tiny_mla import tiny_eagle3_mla
from verify_cases import edit

OWN = load_recipe("fp8-ptpc")
RECIPES = {
    "compressed-tensors": OWN,
    "quark": load_recipe("mi325x-fp8"),
    "modelopt": load_recipe("blackwell-fp8"),
    "fp8": dataclasses.replace(load_recipe("blackwell-fp8"), layout="fp8"),
}
K, V = 0.05, 0.25
KV = {"k": K, "v": V}
NAME = "midlayer.self_attn.attn.{}_scale"
"""The one that both engines' draft classes read."""


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def cached(recipe: Recipe, scales: KvCacheScales = "measured") -> Recipe:
    return dataclasses.replace(recipe, kv_cache=KvCacheFormat(dtype="fp8_e4m3", scales=scales))


def quantized(source: Path, recipe: Recipe, out: Path) -> Path:
    plan = make_plan(recipe, read_draft(Checkpoint.open(source)))
    needed = {step.row.module: 0.01 for step in plan.quantized if recipe.needs_input_scales}
    layers = range(len(plan.cache)) if recipe.kv_cache and recipe.kv_cache.needs_traces else ()
    scales = {layer: CacheScales(k=(K,), v=(V + layer,)) for layer in layers}
    measured = MeasuredInputs(input_scales=needed, cache_scales=scales)
    quantize_draft(plan, out, source=resolve_draft(str(source)), measured=measured)
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("cache") / "source")


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read only."""
    return quantized(source, cached(OWN), tmp_path_factory.mktemp("cached") / "out")


@pytest.mark.parametrize("layout", RECIPES)
def test_scales_are_written_read_and_verified(layout: str, source: Path, tmp_path: Path) -> None:
    """Declared as llm-compressor 0.14, ModelOpt 0.47 and Quark 0.13 do for the same model."""
    out = quantized(source, cached(RECIPES[layout]), tmp_path / "out")
    shape = (1,) if layout == "compressed-tensors" else ()
    written = {n: t for n, t in read_tensors(out).items() if n.endswith(("k_scale", "v_scale"))}
    values = {NAME.format(n): Stored("F32", shape, np.float32(x).tobytes()) for n, x in KV.items()}
    assert written == values
    stored = StoredDraft.read(Checkpoint.open(out))
    cache = stored.kv_cache()
    assert cache is not None
    scales = {0: CacheScales(k=(float(np.float32(K)),), v=(V,))}
    assert (cache.dtype, dict(cache.scales)) == ("fp8_e4m3", scales)
    assert verify(out, source).ok
    assert "KV cache fp8_e4m3" in str(stored.scheme)
    said = read_json(out / "config.json")["quantization_config"]
    if layout == "quark":
        assert said["export"]["kv_cache_group"] == ["*k_proj", "*v_proj"]
        assert said["layer_quant_config"] == said["kv_cache_quant_config"]
        for linear in said["kv_cache_quant_config"].values():
            spec = linear["output_tensors"]
            assert (spec["dtype"], spec["qscheme"]) == ("fp8_e4m3", "per_tensor")
            assert {**linear, "output_tensors": None} == said["global_quant_config"]
    elif layout == "fp8":
        assert said["kv_cache_scheme"] == "static"
    else:
        scheme = {"num_bits": 8, "type": "float", "dynamic": False}
        scheme |= {"strategy": "tensor", "symmetric": True} if shape else {}
        assert said["kv_cache_scheme"].items() >= scheme.items()
    if layout == "modelopt":
        side = read_json(out / "hf_quant_config.json")["quantization"]
        assert side["kv_cache_quant_algo"] == "FP8"


def test_what_cannot_be_written_is_refused(source: Path, tmp_path: Path) -> None:
    draft = read_draft(Checkpoint.open(source))
    plan, plain = make_plan(cached(OWN), draft), make_plan(OWN, draft)
    added = sum(plan.overhead().values()) - sum(plain.overhead().values())
    assert added == plan.bytes_after - plain.bytes_after > 0
    with pytest.raises(DraftQuantError):
        quantize_draft(plan, tmp_path / "out", source=resolve_draft(str(source)))
    for wrong in (0.0, float("nan"), 1e-60):
        with pytest.raises(DraftQuantError):
            quantize_draft(
                plan, tmp_path / "out", source=resolve_draft(str(source)),
                measured=MeasuredInputs(cache_scales={0: CacheScales(k=(wrong,), v=(1.0,))}),
            )  # fmt: skip
    latent = read_draft(Checkpoint.open(tiny_eagle3_mla(tmp_path / "mla")))
    with pytest.raises(PlanError):
        make_plan(cached(OWN, "unit"), latent)
    assert not (tmp_path / "out").exists()


def test_transcoding_carries_scales_and_back(folder: Path, source: Path, tmp_path: Path) -> None:
    before, first = StoredDraft.read(Checkpoint.open(folder)).kv_cache(), folder
    layouts: tuple[LayoutName, ...] = ("quark", "compressed-tensors")
    for layout in layouts:
        out = tmp_path / layout
        transcode_draft(plan_transcoding(resolve_draft(str(first)), layout), out)
        after, first = StoredDraft.read(Checkpoint.open(out)), out
        assert after.kv_cache() == before
        assert after.scheme is not None
        assert after.scheme.layout.name == layout
        assert verify(out, source).ok


def changed(folder: Path, out: Path, *values: float, name: str = "k") -> Path:
    """The same folder with another scale, or without one."""
    shutil.copytree(folder, out)
    key, scales = NAME.format(name), store(np.array(values), "F32")
    edit(out, lambda t: t.update({key: scales}) if values else t.pop(key))
    return out


def test_scales_that_are_none_are_refused(folder: Path, source: Path, tmp_path: Path) -> None:
    for value, got in ((0.0, "0"), (float("nan"), "nan"), (-0.5, "-0.5")):
        out = changed(folder, tmp_path / got, value)
        faults = [f for f in verify(out, source).faults if f.where.endswith("k_scale")]
        assert any((f.expected, f.got) == ("a positive, finite scale", got) for f in faults)
        with pytest.raises(CheckpointError):
            StoredDraft.read(Checkpoint.open(out)).kv_cache()
    assert main(["inspect", str(changed(folder, tmp_path / "of-keys", 1.0))]) == 0
    other = verify(changed(folder, tmp_path / "other", 2 * K), source).faults
    said = [f for f in other if f.expected.endswith("(that of the run)")]
    assert [f.where for f in said] == [NAME.format("k")]
    absent = verify(changed(folder, tmp_path / "absent", name="v"), source).faults
    where = [f.where for f in absent if f.expected == "a scale of the KV cache"]
    assert where == ["midlayer.self_attn: v_scale"]
    for out in (tmp_path / "other", tmp_path / "absent"):  # and beside what it was made from
        found = verify_transcoded(StoredDraft.read(Checkpoint.open(folder)), out).faults
        assert "config.json: KV cache" in {fault.where for fault in found}
    more = verify_transcoded(StoredDraft.read(Checkpoint.open(source)), folder).faults
    assert "q_proj" in next(fault.got for fault in more if fault.expected == "the same linears")


def test_scales_of_absent_heads_are_refused(folder: Path, source: Path, tmp_path: Path) -> None:
    """A folder of another tool, whose scales are of two key-value heads, or of three."""
    for count, strategy, wanted in (
        (2, "attn_head", None),
        (2, "tensor", "one scale, as declared (no strategy attn_head)"),
        (3, "attn_head", "one scale, or 2: one per key-value head"),
    ):
        out = changed(folder, tmp_path / f"{count}-{strategy}", *[K] * count)
        declared = read_json(out / "config.json")["quantization_config"]
        declared["kv_cache_scheme"]["strategy"] = strategy
        edit_json(out / "config.json", quantization_config=declared)
        (out / "draftquant.json").unlink()
        faults = [f for f in verify(out, source, foreign=True).faults if "k_scale" in f.where]
        assert [(f.expected, f.got) for f in faults] == ([(wanted, f"{count}")] if wanted else [])
        if wanted is None:
            assert len(load_draft(out).cache_scales[0].k) == count
        else:
            with pytest.raises(CheckpointError):
                load_draft(out)
    assert dq.check(folder, "sglang", gpu="h200").verdict == "LOADS"
    shutil.copytree(folder, by_head := tmp_path / "by-head")
    edit_json(by_head / "config.json", quantization_config=declared)
    assert dq.check(by_head, "sglang", gpu="h200").verdict == "LOADS BUT WRONG"
    declared["kv_cache_scheme"]["type"] = "int"
    edit_json(by_head / "config.json", quantization_config=declared)
    assert "kv_cache_dtype" not in str(dq.check(by_head, "vllm", gpu="h200").answer.launch)
    del declared["kv_cache_scheme"]  # used where an option asks for the cache
    edit_json(by_head / "config.json", quantization_config=declared)
    assert load_draft(by_head, kv_cache="fp8_e4m3").cache_scales[0].v == (V,)


def test_scales_taken_for_zero_are_refused(folder: Path, source: Path, tmp_path: Path) -> None:
    """And nothing is dequantized of a folder whose scales are damaged, though it drops them."""
    out = changed(folder, tmp_path / "out", 1e-39)
    (out / "draftquant.json").unlink()
    (fault,) = [f for f in verify(out, source, foreign=True).faults if "k_scale" in f.where]
    assert fault.expected.startswith("a scale of at least 1.18e-38")
    assert main(["dequantize", str(out), "--out", str(tmp_path / "plain")]) == 2
    assert not (tmp_path / "plain").exists()
