"""Vendor backends from outside: lazy imports, early failures, refused weights."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from by_recipe import quantized
from draftquant.quantize.backends import get_backend
from draftquant.quantize.backends import quark_backend as quark_import
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import BackendName, WeightFormat
from tiny import tiny_eagle3_llama
from weight_formats import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT4, INT4_F16, MXFP4, NVFP4

DISTRIBUTIONS = {"quark": "amd-quark", "modelopt": "nvidia-modelopt"}
INSTALLED_BY = {
    "quark": "pip install amd-quark==0.13 ninja",
    "modelopt": "pip install 'nvidia-modelopt==0.47.*' requests",
}


def report_version(monkeypatch: pytest.MonkeyPatch, distribution: str, version: str | None) -> None:
    real = importlib.metadata.version

    def reported(name: str) -> str:
        if name != distribution:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", reported)


@pytest.mark.parametrize("name", ["quark", "modelopt"])
def test_missing_toolkit_names_the_extra(
    name: BackendName, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A backend is constructed without its toolkit, and what it cannot do refused."""
    draft, stages = tiny_eagle3_llama(tmp_path / "draft"), list[str]()
    told: dict[str, Any] = {"backend": name, "on_stage": stages.append}
    monkeypatch.setitem(sys.modules, name, None)  # to import it is an error
    report_version(monkeypatch, DISTRIBUTIONS[name], None)
    for asked in (
        lambda: get_backend(name).check(FP8_TENSOR), get_backend(name).versions,
        lambda: quantized(draft, "fp8-ptpc", tmp_path / "out", **told),
    ):  # fmt: skip
        with pytest.raises(BackendError, match="not installed") as caught:
            asked()
        assert caught.value.fix.startswith(INSTALLED_BY[name])
    assert not stages  # before any work
    for other in ("0.11.1", "0.13.1", "0.470.0"):
        report_version(monkeypatch, DISTRIBUTIONS[name], other)
        with pytest.raises(BackendError, match=f"got {other}, whose results were never verified"):
            get_backend(name).check(FP8_TENSOR)


OTHERS: dict[BackendName, tuple[str, tuple[WeightFormat, ...]]] = {
    "modelopt": ("0.47.0", (MXFP4, FP8_BLOCK)),
    "quark": ("0.13", (NVFP4, FP8_BLOCK, INT4_F16)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_formats_of_others_are_refused(name: BackendName, monkeypatch: pytest.MonkeyPatch) -> None:
    version, formats = OTHERS[name]
    report_version(monkeypatch, DISTRIBUTIONS[name], version)
    for weights in formats:
        with pytest.raises(BackendError):
            get_backend(name).check(weights)


def test_quark_needs_a_compiler_only_until_its_extension_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report_version(monkeypatch, "amd-quark", "0.13")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ninja").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    with pytest.raises(BackendError, match=r"no compiler 'c\+\+' found"):
        get_backend("quark").check(INT4)
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
    assert (quark["found"], other["found"]) == ([0, 1], [1, 1])
    exec(script, quark)
    assert quark["found"] == [1, 1]


def test_an_unusable_build_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    monkeypatch.delitem(sys.modules, "quark.torch", raising=False)
    with (
        pytest.raises(BackendError, match="cannot be built there: Not a directory"),
        quark_import.quark_process_state(),
    ):
        pytest.fail("Quark was imported")


UNUSABLE = [
    (torch.tensor([[1.0, float("nan")]]), None, "got NaN or inf"),
    (torch.tensor([[1.0, 2.0], [-float("inf"), 0.0]]), None, "got NaN or inf"),
    (torch.ones(8), None, "expected a non-empty matrix"),
    (torch.ones(0, 8), None, "expected a non-empty matrix"),
    (torch.ones(2, 8, dtype=torch.float64), None, "bfloat16, float16 or float32"),
    (torch.ones(2, 8), torch.tensor([[0.5]]), "expected an absmax of at least 1"),
]


@pytest.mark.parametrize("name", ["quark", "modelopt"])
def test_unusable_weight_is_refused_before_the_toolkit_sees_it(
    name: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    for weight, absmax, message in UNUSABLE:
        with pytest.raises(BackendError, match=message):
            get_backend(name).quantize(weight, FP8_TENSOR, absmax)
    with pytest.raises(BackendError, match="for one scale of the whole matrix, got 2 for"):
        get_backend(name).quantize(torch.ones(2, 8), FP8_CHANNEL, torch.tensor([[2.0]]))
    report_version(monkeypatch, DISTRIBUTIONS["modelopt"], "0.47.0")
    with pytest.raises(BackendError, match="ModelOpt has no scale for less"):
        get_backend("modelopt").quantize(torch.tensor([[1.0], [1e-39]]), FP8_CHANNEL)
