"""The whole way of one draft: plan, write, verify, publish; and what is left when a step fails."""

import json
import os
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from by_recipe import dimensions, planned, quantized
from data_free import LAYERS_ALONE
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.preparing import checked_scales
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.verify import verify
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import BackendName
from draftquant.scripts.cli import main
from tiny import read_tensors, store, tiny_eagle3_llama, values_of, write_tensors
from tiny_mla import tiny_eagle3_mla

Q_PROJ = "midlayer.self_attn.q_proj.weight"


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


LLAMA, MLA = "eagle3-llama", "eagle3-mla"
BUILDERS = {LLAMA: tiny_eagle3_llama, MLA: tiny_eagle3_mla}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    (LLAMA, {}),
    (LLAMA, {"prefix": "layers.0.", "sharded": True, "num_layers": 2}),
    (LLAMA, {"prefix": "model.layers.0.", "embed": False, "head": False}),
    (LLAMA, {"pruned_vocabulary": True, "dtype": "F32"}),
    (LLAMA, {"dtype": "F16"}),
    (MLA, {"prefix": "layers.0.", "num_layers": 3}),
    (MLA, {"modelopt": True, "dtype": "F16"}),
    (MLA, {"prefix": "model.layers.0.", "sharded": True, "fc_norm": True, "norm_output": True}),
    (MLA, {"pruned_vocabulary": True, "embed": False, "head": False}),
]
CASES = [(recipe, *VARIANTS[i % len(VARIANTS)]) for i, recipe in enumerate(LAYERS_ALONE)]


@pytest.mark.some(9)
@pytest.mark.parametrize(("recipe", "family", "variant"), CASES)
def test_a_recipe_on_a_variant_is_written_and_verified(
    recipe: str, family: str, variant: dict[str, Any], tmp_path: Path
) -> None:
    """Of every layer seven linears are quantized, kv_b_proj is not; all else stays as it was."""
    source = BUILDERS[family](tmp_path / "draft", **variant | dimensions(family, recipe))
    before = files(source)
    report = quantized(source, recipe, tmp_path / "out")
    assert report.verification.ok
    assert report.verification.output == str(report.out)  # not of the staging folder
    assert verify(tmp_path / "out", source).ok
    assert files(source) == before
    assert Checkpoint.open(tmp_path / "out").nbytes == report.plan.bytes_after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out"]
    stored = {name for name, t in read_tensors(source).items()
              if read_tensors(tmp_path / "out").get(name) != t}  # fmt: skip
    assert len(stored) == 7 * variant.get("num_layers", 1)
    assert all("_proj" in name and "kv_b_proj" not in name for name in stored)


@pytest.mark.vendor
@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("mi325x-w4a8", "quark"),
        ("mi325x-w4a8-fp8", "quark"),
        ("int4-channel", "quark"),
        ("blackwell-fp8", "quark"),
        ("fp8-ptpc", "modelopt"),
        ("blackwell-fp8", "modelopt"),
        ("int4-group128", "quark"),
        ("mi355-mxfp4", "quark"),
        ("blackwell-nvfp4", "modelopt"),
    ],
)
def test_vendors_write_the_same_files(tmp_path: Path, recipe: str, backend: BackendName) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", **dimensions("eagle3-llama", recipe))
    quantized(source, recipe, tmp_path / "ours")
    quantized(source, recipe, tmp_path / "theirs", backend=backend)
    ours, theirs = files(tmp_path / "ours"), files(tmp_path / "theirs")
    made_by = json.loads(theirs.pop("draftquant.json"))["backend_versions"]
    assert {"quark": "amd-quark", "modelopt": "nvidia-modelopt"}[backend] in made_by
    del ours["draftquant.json"]
    assert ours == theirs


def test_reads_and_writes_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux moves 2 GiB at most in one call, and less where a signal comes in."""
    source = tiny_eagle3_llama(tmp_path / "draft", sharded=True)
    quantized(source, "blackwell-fp8", tmp_path / "whole")
    preadv, pwrite, copy = os.preadv, os.pwrite, os.copy_file_range
    monkeypatch.setattr(os, "preadv", lambda d, views, at: preadv(d, [views[0][:999]], at))
    monkeypatch.setattr(os, "pwrite", lambda d, data, at: pwrite(d, data[:777], at))
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, *at: copy(a, b, min(n, 555), *at))
    quantized(source, "blackwell-fp8", tmp_path / "short")
    monkeypatch.undo()
    assert files(tmp_path / "short") == files(tmp_path / "whole")


@pytest.mark.parametrize("recipe", ["int4-channel", "mi325x-int4-awq"])
def test_all_zero_rows_are_refused_unless_allowed(tmp_path: Path, recipe: str) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", **dimensions("eagle3-llama", recipe))
    tensors = read_tensors(source)
    values = values_of(tensors[Q_PROJ]).copy()
    values[5:7] = 0
    write_tensors(source, tensors | {Q_PROJ: store(values, "BF16")}, metadata={"format": "pt"})
    command = ["quantize", str(source), "--recipe", recipe, "--out", str(tmp_path / "out")]
    assert main([*command, "--backend", "torch"]) == 2
    assert not (tmp_path / "out").exists()
    assert main([*command, "--backend", "torch", "--allow-zero-rows"]) == 0
    assert verify(tmp_path / "out", source).ok


def test_torch_has_as_many_threads_as_before(tmp_path: Path) -> None:
    """In threads that begin afterwards too, to which torch gives what was set last."""

    def of_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    source = tiny_eagle3_llama(tmp_path / "draft")
    try:
        torch.set_num_threads(3)
        quantized(source, "fp8-ptpc", tmp_path / "out")
        assert (torch.get_num_threads(), of_a_new_thread()) == (3, 3)
        assert main(["dequantize", str(tmp_path / "out"), "--out", str(tmp_path / "plain")]) == 0
        assert (torch.get_num_threads(), of_a_new_thread()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_every_linear_needs_its_static_scale(tmp_path: Path) -> None:
    plan = planned(tiny_eagle3_llama(tmp_path / "draft"), "blackwell-fp8")
    with pytest.raises(BackendError, match=r"--traces.*fp8-ptpc.*--input-scale 1\.0"):
        quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=tmp_path / "draft"))
    modules = [step.row.module for step in plan.quantized]
    for left_out in modules:
        with pytest.raises(BackendError, match=rf"Missing: {re.escape(left_out)}\n"):
            checked_scales(plan, {module: 0.25 for module in modules if module != left_out})


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The kernel refuses the file size, as it refuses a full disk: when space is reserved."""
    draft = str(tiny_eagle3_llama(tmp_path / "draft"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        code = main(["quantize", draft, "--recipe", "int4-channel", "--out", f"{tmp_path}/out"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208
