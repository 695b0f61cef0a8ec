"""The whole way of one draft: plan, write, verify, publish; and what is left when a step fails."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from by_recipe import planned, quantized
from data_free import DATA_FREE
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.preparing import checked_scales
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import Measured
from draftquant.quantize.verify import verify
from draftquant.recipes.errors import BackendError, OutputError, VerifyError
from draftquant.recipes.schema import BackendName
from draftquant.scripts.cli import main
from tiny import Stored, read_tensors, tiny_eagle3_llama, write_tensors
from wide import dimensions

Q_PROJ = "midlayer.self_attn.q_proj.weight"


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


VARIANTS = {
    "midlayer": {},
    "layers-0": {"prefix": "layers.0."},
    "model-prefix": {"prefix": "model.layers.0."},
    "sharded": {"sharded": True},
    "no-embedding-no-head": {"embed": False, "head": False},
    "pruned-vocabulary": {"pruned_vocabulary": True},
    "two-layers": {"num_layers": 2},
    "float16": {"dtype": "F16"},
    "float32": {"dtype": "F32"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("recipe", DATA_FREE)
def test_every_recipe_on_every_variant_is_written_and_verified(
    tmp_path: Path, recipe: str, variant: str
) -> None:
    wide = dimensions("eagle3-llama", recipe)
    source = tiny_eagle3_llama(tmp_path / "draft", **VARIANTS[variant] | wide)
    before = files(source)
    report = quantized(source, recipe, tmp_path / "out")
    assert report.verification.ok
    assert report.verification.output == str(report.out)  # not of the staging folder
    assert verify(tmp_path / "out", source).ok
    assert files(source) == before
    assert sum(t.nbytes for t in Checkpoint.open(tmp_path / "out").tensors.values()) == (
        report.plan.bytes_after
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out"]


@pytest.mark.vendor
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("mi325x-w4a8", "quark"),
        ("mi325x-w4a8-fp8", "quark"),
        ("int4-channel", "quark"),
        ("fp8-ptpc", "quark"),
        ("blackwell-fp8", "quark"),
        ("fp8-ptpc", "modelopt"),
        ("blackwell-fp8", "modelopt"),
        ("mi325x-fp8", "quark"),
        ("int4-group128", "quark"),
        ("mi355-mxfp4", "quark"),
        ("blackwell-fp8-mla", "modelopt"),
        ("blackwell-nvfp4", "modelopt"),
    ],
)
def test_vendor_backends_write_the_same_files(
    tmp_path: Path, recipe: str, backend: BackendName
) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", **dimensions("eagle3-llama", recipe))
    quantized(source, recipe, tmp_path / "ours")
    quantized(source, recipe, tmp_path / "theirs", backend=backend)
    ours, theirs = files(tmp_path / "ours"), files(tmp_path / "theirs")
    made_by = json.loads(theirs.pop("draftquant.json"))["backend_versions"]
    assert {"quark": "amd-quark", "modelopt": "nvidia-modelopt"}[backend] in made_by
    del ours["draftquant.json"]
    assert ours == theirs


def test_reads_and_writes_that_the_kernel_cuts_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux moves 2 GiB at most in one call, and less where a signal comes in."""
    source = tiny_eagle3_llama(tmp_path / "draft", sharded=True)
    quantized(source, "blackwell-fp8", tmp_path / "whole")
    preadv, pwrite, copy = os.preadv, os.pwrite, os.copy_file_range
    monkeypatch.setattr(os, "preadv", lambda d, views, at: preadv(d, [views[0][:999]], at))
    monkeypatch.setattr(os, "pwrite", lambda d, data, at: pwrite(d, data[:777], at))
    monkeypatch.setattr(
        os, "copy_file_range", lambda a, b, count, *at: copy(a, b, min(count, 555), *at)
    )
    quantized(source, "blackwell-fp8", tmp_path / "short")
    monkeypatch.undo()
    assert files(tmp_path / "short") == files(tmp_path / "whole")


def row_bytes(folder: Path) -> int:
    return 2 * read_tensors(folder)[Q_PROJ].shape[1]


def damage(folder: Path, name: str, value: bytes, *, at: int) -> None:
    tensors = read_tensors(folder)
    old = tensors[name]
    data = old.data[:at] + value + old.data[at + len(value) :]
    tensors[name] = Stored(old.dtype, old.shape, data)
    write_tensors(folder, tensors, sharded=False, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("recipe", "value", "row"),
    [
        ("fp8-ptpc", b"\xc0\x7f", 0),
        ("int4-group128", b"\x80\x7f", 3),
        ("mi355-mxfp4", b"\x80\xff", 63),
        ("blackwell-fp8", b"\xc0\x7f", 63),
        ("nvfp4-weights", b"\x80\x7f", 0),
    ],
    ids=str,
)
def test_nan_and_inf_name_tensor_and_row(
    tmp_path: Path, recipe: str, value: bytes, row: int
) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", **dimensions("eagle3-llama", recipe))
    damage(source, Q_PROJ, value, at=row * row_bytes(source) + 10)
    with pytest.raises(BackendError, match=rf"{Q_PROJ}: row {row} holds NaN or inf"):
        quantized(source, recipe, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("recipe", ["fp8-ptpc", "int4-channel", "mi355-mxfp4"])
def test_all_zero_rows_are_refused_unless_allowed(
    tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", **dimensions("eagle3-llama", recipe))
    damage(source, Q_PROJ, bytes(2 * row_bytes(source)), at=5 * row_bytes(source))
    command = ["quantize", str(source), "--recipe", recipe, "--out", str(tmp_path / "out")]
    assert main([*command, "--backend", "torch"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "2 all-zero row(s) from row 5" in said
    assert "--allow-zero-rows" in said
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
        command = ["dequantize", str(tmp_path / "out"), "--out", str(tmp_path / "plain")]
        assert main(command) == 0
        assert (torch.get_num_threads(), of_a_new_thread()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_an_existing_output_is_never_touched(tmp_path: Path) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match=r"out: it already exists"):
        quantized(source, "int4-channel", tmp_path / "out")
    assert files(tmp_path / "out") == {"notes.txt": b"mine"}


def test_a_static_recipe_without_scales_names_the_ways_out(tmp_path: Path) -> None:
    plan = planned(tiny_eagle3_llama(tmp_path / "draft"), "blackwell-fp8")
    with pytest.raises(BackendError, match=r"--traces.*fp8-ptpc.*--input-scale 1\.0"):
        quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=tmp_path / "draft"))


def test_every_linear_needs_its_static_scale(tmp_path: Path) -> None:
    plan = planned(tiny_eagle3_llama(tmp_path / "draft"), "blackwell-fp8")
    modules = [step.row.module for step in plan.quantized]
    for left_out in modules:
        given = {module: 0.25 for module in modules if module != left_out}
        with pytest.raises(BackendError, match=rf"Missing: {re.escape(left_out)}\n"):
            checked_scales(plan, given)


def test_scales_for_a_dynamic_recipe_are_refused(tmp_path: Path) -> None:
    plan = planned(tiny_eagle3_llama(tmp_path / "draft"), "fp8-ptpc")
    source = DraftSource(folder=tmp_path / "draft")
    with pytest.raises(BackendError, match="not static"):
        quantize_draft(
            plan, tmp_path / "out", source=source, measured=Measured(input_scales={"x": 1.0})
        )


def test_what_fails_verification_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that flips one nibble: the independent decoder sees it, and nothing appears."""
    from draftquant.quantize.numerics import quantized_weight as packing

    right = packing.int4_words
    monkeypatch.setattr(packing, "int4_words", lambda *args, **kwargs: right(*args, **kwargs) ^ 1)
    source = tiny_eagle3_llama(tmp_path / "draft")
    with pytest.raises(VerifyError, match="not published"):
        quantized(source, "int4-channel", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The kernel refuses the file size, as it refuses a full disk: when space is reserved."""
    tiny_eagle3_llama(tmp_path / "draft")
    script = """
        import resource, signal, sys
        from draftquant.scripts.cli import main
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        sys.exit(main(["quantize", "draft", "--recipe", "int4-channel", "--out", "out"]))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "out: cannot be written: File too large" in run.stderr
    assert "nothing was kept" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.some(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_a_killed_run_publishes_nothing(tmp_path: Path, number: signal.Signals) -> None:
    tiny_eagle3_llama(tmp_path / "draft")
    script = """
        import sys, time
        from draftquant.quantize.files import publish
        from draftquant.scripts.cli import main
        publish.copy_side_files = lambda *_: (print("written", flush=True), time.sleep(60))
        sys.exit(main(["quantize", "draft", "--recipe", "int4-channel", "--out", "out"]))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        time.sleep(0.1)
        os.kill(process.pid, number)
        process.wait()
    assert not (tmp_path / "out").exists()
    left = [path for path in tmp_path.iterdir() if path.name != "draft"]
    if number == signal.SIGTERM:
        assert left == []
    else:  # nothing that looks like a checkpoint: no config.json beside the weights
        assert all(path.name.startswith(".out.") for path in left)
        assert not any((path / "config.json").exists() for path in left)
