"""Vendor backends from outside: lazy imports, early failures, refused weights, a clean process."""

import contextlib
import importlib.metadata
import io
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.backends import get_backend
from draftquant.quantize.backends import quark_backend as quark_import
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import BackendName, WeightFormat
from vendors import needs
from weight_formats import FP8_CHANNEL, FP8_TENSOR, INT4, NVFP4

DISTRIBUTIONS = {"quark": "amd-quark", "modelopt": "nvidia-modelopt"}
INSTALLED_BY = {
    "quark": "pip install amd-quark==0.13 ninja",
    "modelopt": "pip install 'nvidia-modelopt==0.47.*' requests",
}
VENDORS = [
    pytest.param(name, marks=[pytest.mark.vendor, needs(name)]) for name in ("quark", "modelopt")
]


def report_version(monkeypatch: pytest.MonkeyPatch, distribution: str, version: str | None) -> None:
    real = importlib.metadata.version

    def reported(name: str) -> str:
        if name != distribution:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", reported)


def install_scripts_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `folder` the place where this interpreter's packages put their programs."""
    real = sysconfig.get_path

    def get_path(name: str, *args: Any, **options: Any) -> str:
        return str(folder) if name == "scripts" else real(name, *args, **options)

    monkeypatch.setattr(sysconfig, "get_path", get_path)


def test_backends_are_constructed_without_their_toolkit() -> None:
    program = (
        "import sys\n"
        "from draftquant.quantize.backends import get_backend\n"
        "from draftquant.recipes import Algorithm\n"
        "names = [get_backend(name).name for name in ('torch', 'quark', 'modelopt')]\n"
        "gptq = Algorithm(scale='absmax', rounding='gptq')\n"
        "assert [get_backend(name, gptq).name for name in names] == names\n"
        "loaded = {name.split('.')[0] for name in sys.modules} & {'quark', 'modelopt'}\n"
        "print(names, sorted(loaded))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['torch', 'quark', 'modelopt'] []"


@pytest.mark.parametrize("name", ["quark", "modelopt"])
def test_missing_toolkit_names_the_extra(
    name: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_version(monkeypatch, DISTRIBUTIONS[name], None)
    with pytest.raises(BackendError, match="not installed") as caught:
        get_backend(name).check(FP8_TENSOR)
    assert caught.value.fix.startswith(INSTALLED_BY[name])
    with pytest.raises(BackendError, match="not installed"):
        get_backend(name).versions()


@pytest.mark.parametrize(
    ("name", "other"), [("quark", "0.11.1"), ("quark", "0.13.1"), ("modelopt", "0.470.0")]
)
def test_untested_version_is_refused(
    name: BackendName, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_version(monkeypatch, DISTRIBUTIONS[name], other)
    with pytest.raises(BackendError, match=f"got {other}, whose results were never verified"):
        get_backend(name).check(FP8_TENSOR)


REFUSED_FORMATS: list[tuple[BackendName, WeightFormat, str]] = [
    ("modelopt", WeightFormat(dtype="mxfp4", granularity="group", group_size=32, symmetric=True),
     "got mxfp4 per group of 32"),
    ("modelopt", WeightFormat(dtype="fp8_e4m3", granularity="block", group_size=128,
                              symmetric=True), "got fp8_e4m3 per block of 128"),
    ("quark", WeightFormat(dtype="nvfp4", granularity="group", group_size=16, symmetric=True),
     "does not compute nvfp4 per group of 16"),
    ("quark", WeightFormat(dtype="fp8_e4m3", granularity="block", group_size=128,
                           symmetric=True), "does not compute fp8_e4m3 per block of 128"),
    ("quark", WeightFormat(dtype="int4", granularity="group", group_size=128, symmetric=True,
                           scale_dtype="float16"), "does not compute scale_dtype float16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "weights", "message"), REFUSED_FORMATS)
def test_formats_that_a_toolkit_does_not_compute_are_refused(
    name: BackendName, weights: WeightFormat, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_version(monkeypatch, "nvidia-modelopt", "0.47.0")
    report_version(monkeypatch, "amd-quark", "0.13")
    with pytest.raises(BackendError, match=message) as caught:
        get_backend(name).check(weights)
    assert "backend: torch" in caught.value.fix


def test_quark_needs_a_compiler_only_until_its_extension_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report_version(monkeypatch, "amd-quark", "0.13")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ninja").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    with pytest.raises(BackendError, match=r"no compiler 'c\+\+' found") as caught:
        get_backend("quark").check(INT4)
    assert "install g++" in caught.value.fix
    name = quark_import.EXTENSION
    built = quark_import.extension_folder() / name / f"{name}.so"
    built.parent.mkdir(parents=True)
    built.touch()
    get_backend("quark").check(INT4)


def test_the_lock_file_of_a_build_that_was_killed_is_removed(tmp_path: Path) -> None:
    lock = tmp_path / quark_import.EXTENSION / "lock"
    lock.parent.mkdir()
    lock.touch()
    with quark_import._alone_in(tmp_path):
        assert not lock.exists()


def test_quarks_search_parses_only_files_that_name_what_it_seeks() -> None:
    """And nobody else's parsing changes, nor does anything afterwards."""
    sought = "@use_experts_implementation\nclass A: ..."
    script = f"import ast; found = [len(ast.parse(t).body) for t in ('x = 1', {sought!r})]"
    quark: dict[str, Any] = {"__name__": "quark.torch.utils.llm.module_replacement.quark_experts"}
    other: dict[str, Any] = {"__name__": "other"}
    with quark_import._parsing_what_names_experts():
        exec(script, quark)
        exec(script, other)
    assert quark["found"] == [0, 1]
    assert other["found"] == [1, 1]
    exec(script, quark)
    assert quark["found"] == [1, 1]


def test_a_build_folder_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    monkeypatch.delitem(sys.modules, "quark.torch", raising=False)
    with (
        pytest.raises(BackendError, match="cannot be built there: Not a directory") as caught,
        quark_import.quark_process_state(),
    ):
        pytest.fail("Quark was imported")
    assert "set TORCH_EXTENSIONS_DIR" in caught.value.fix


REFUSED = {
    "nan": (torch.tensor([[1.0, float("nan")]]), None, "got NaN or inf"),
    "inf": (torch.tensor([[1.0, 2.0], [float("inf"), 0.0]]), None, "got NaN or inf"),
    "minus inf": (torch.tensor([[-float("inf"), 1.0]]), None, "got NaN or inf"),
    "vector": (torch.ones(8), None, "expected a non-empty matrix"),
    "no rows": (torch.ones(0, 8), None, "expected a non-empty matrix"),
    "no columns": (torch.ones(8, 0), None, "expected a non-empty matrix"),
    "integers": (torch.ones(2, 8, dtype=torch.int32), None, "bfloat16, float16 or float32"),
    "float64": (torch.ones(2, 8, dtype=torch.float64), None, "bfloat16, float16 or float32"),
    "small absmax": (torch.ones(2, 8), torch.tensor([[0.5]]), "expected an absmax of at least 1"),
}


@pytest.mark.parametrize("name", ["quark", "modelopt"])
def test_unusable_weight_is_refused_before_the_toolkit_sees_it(name: BackendName) -> None:
    for weight, absmax, message in REFUSED.values():
        with pytest.raises(BackendError, match=message):
            get_backend(name).quantize(weight, FP8_TENSOR, absmax)


@pytest.mark.parametrize("name", ["quark", "modelopt"])
def test_an_absmax_for_rows_with_scales_of_their_own_is_refused(name: BackendName) -> None:
    with pytest.raises(BackendError, match="for one scale of the whole matrix, got 2 for"):
        get_backend(name).quantize(torch.ones(2, 8), FP8_CHANNEL, torch.tensor([[2.0]]))


WITH_ABSMAX = [("quark", FP8_TENSOR), ("modelopt", FP8_TENSOR), ("modelopt", NVFP4)]


@pytest.mark.each_value
@pytest.mark.parametrize("name_and_weights", WITH_ABSMAX, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [1.0, 1.7, 40.0])
def test_vendors_cover_the_absmax_of_fused_weights_as_torch_does(
    name_and_weights: tuple[BackendName, WeightFormat], dtype: torch.dtype, factor: float
) -> None:
    """1.7 times a bfloat16 is none: the weight is then given to the toolkit in float32."""
    (name, weights), torch_backend = name_and_weights, get_backend("torch")
    pytest.importorskip({"quark": "quark", "modelopt": "modelopt"}[name])
    weight = (torch.randn(24, 64, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype)
    absmax = (weight.abs().amax().float() * factor).reshape(1, 1)
    theirs = get_backend(name).quantize(weight.clone(), weights, absmax)
    ours = torch_backend.quantize(weight, weights, absmax)
    assert theirs.codes.shape == weight.shape
    assert torch.equal(theirs.codes.view(torch.uint8), ours.codes.view(torch.uint8))
    assert torch.equal(theirs.scale.float(), ours.scale.float())
    if factor > 1:
        own = torch_backend.quantize(weight, weights)
        assert not torch.equal(own.codes.view(torch.uint8), ours.codes.view(torch.uint8))
    if weights.dtype == "nvfp4":
        assert ours.global_scale is not None
        assert theirs.global_scale is not None
        assert torch.equal(theirs.global_scale, ours.global_scale)


@pytest.mark.parametrize("name", VENDORS)
def test_first_use_leaves_the_process_as_it_was(
    name: BackendName, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The import really happens here; Quark's without ninja on PATH, as in a venv not activated."""
    programs, scripts = tmp_path / "programs", tmp_path / "scripts"
    for folder, names in ((programs, ("c++", "g++", "gcc", "as", "ld")), (scripts, ("ninja",))):
        folder.mkdir()
        for program in names:
            found = shutil.which(program)
            if found is not None:
                (folder / program).symlink_to(found)
    # The same ninja: another version would rebuild the extension.
    if (scripts / "ninja").exists():
        install_scripts_in(scripts, monkeypatch)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("QUARK_DISABLE_COMPILE", raising=False)

    def process_state() -> dict[str, object]:
        return {
            "environment": dict(os.environ),
            "warning filters": list(warnings.filters),
            "root logger": (logging.root.level, list(logging.root.handlers)),
            "logging disabled": logging.root.manager.disable,
            "threads": torch.get_num_threads(),
            "default dtype": torch.get_default_dtype(),
            "gradients": torch.is_grad_enabled(),
            "streams": (sys.stdout, sys.stderr),
        }

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        before = process_state()
        get_backend(name).quantize(torch.eye(8), FP8_TENSOR)
        after = process_state()
    assert after == before
    assert printed.getvalue() == ""


@pytest.mark.parametrize("name", VENDORS)
def test_toolkit_failure_becomes_a_backend_error(
    name: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A meta tensor passes no toolkit; our own checks, which need values, are bypassed."""
    module = sys.modules[type(get_backend(name)).__module__]
    monkeypatch.setattr(module, "finite_absmax", lambda *_: torch.ones(8, 1))
    with pytest.raises(BackendError, match="failed: ") as caught:
        get_backend(name).quantize(torch.ones(8, 8, device="meta"), FP8_TENSOR)
    assert caught.value.__cause__ is not None
    assert "backend: torch" in caught.value.fix
