"""ModelOpt's declaration in each form: flat, nested in config.json, hf_quant_config.json alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from asked_pairs import check_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.layouts import HF_QUANT_CONFIG
from draftquant.quantize.stored.layouts.scheme import DeclaredScheme
from draftquant.quantize.stored.stored_declaration import declared_scheme
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from draftquant.recipes.errors import VerifyError
from draftquant.scripts.cli import main
from tiny import config_of, read_tensors, tiny_eagle3_llama, write_tensors
from verify_cases import edit_declaration, quantized_folder

RECIPES = ("blackwell-fp8", "blackwell-nvfp4")
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("forms") / "draft")


@pytest.fixture(scope="module")
def flat(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """What we write: the flat form in config.json, the nested one beside it."""
    folder = tmp_path_factory.mktemp("flat")
    return {name: quantized_folder(draft, folder / name, name) for name in RECIPES}


NESTED = dict[str, Any]()
FORMS = (NESTED, {"quant_method": "modelopt", "version": "0.47.0"}, None)
"""What stands beside the nested object; None: it is in its own file alone."""


def in_form(folder: Path, form: dict[str, Any] | None, out: Path) -> Path:
    """The same folder with its declaration in another form."""
    shutil.copytree(folder, out)
    side = json.loads((out / HF_QUANT_CONFIG).read_text(encoding="utf-8"))
    config = config_of(out)
    del config["quantization_config"]
    if form is not None:
        config["quantization_config"] = side | form
        (out / HF_QUANT_CONFIG).unlink()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return out


def scheme_of(folder: Path) -> DeclaredScheme:
    scheme = declared_scheme(Checkpoint.open(folder))
    assert scheme is not None
    return scheme


@pytest.mark.parametrize(
    ("name", "form"), [(RECIPES[0], NESTED), *((RECIPES[1], form) for form in FORMS)]
)
def test_every_form_is_read_alike(
    name: str, form: dict[str, Any] | None, flat: Folders, draft: Path, tmp_path: Path
) -> None:
    folder = in_form(flat[name], form, tmp_path / "other")
    assert scheme_of(folder) == scheme_of(flat[name])
    (folder / "draftquant.json").unlink()  # which would demand the form that we write
    report = verify(folder, draft, foreign=True)
    assert report.scheme == str(scheme_of(flat[name]))
    # Whoever writes ModelOpt's layout writes its own file too: TensorRT-LLM reads that one.
    assert [fault.where for fault in report.faults] == ([] if form is None else [HF_QUANT_CONFIG])
    found = audit_checkpoint(Checkpoint.open(folder)).linears
    assert [linear.codes is not None for linear in found] == [True] * 7


def test_a_form_that_is_not_understood(flat: Folders, tmp_path: Path) -> None:
    """Nested with keys that it has not, and a side file that excludes more."""
    for name, change in (("zero", {"has_zero_point": True}), ("ignore", {"ignore": ["*fc*"]})):
        folder = in_form(flat["blackwell-fp8"], NESTED, tmp_path / name)
        edit_declaration(folder, lambda d, change=change: d["quantization"].update(change))
        with pytest.raises(VerifyError):
            scheme_of(folder)
    folder = Path(shutil.copytree(flat["blackwell-fp8"], tmp_path / "side"))
    side = json.loads((folder / HF_QUANT_CONFIG).read_text(encoding="utf-8"))
    side["quantization"]["exclude_modules"].append("*mlp*")
    (folder / HF_QUANT_CONFIG).write_text(json.dumps(side), encoding="utf-8")
    with pytest.raises(VerifyError):
        scheme_of(folder)


NO_ALGORITHM = {"producer": {"name": "modelopt", "version": "0.35.0"},
                "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}  # fmt: skip
CACHE_ALONE = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
FLAT_NULL = {"quant_method": "modelopt", "quant_algo": None, "exclude_modules": ["lm_head"]}


@pytest.mark.parametrize(
    ("declared", "beside", "vllm", "sglang"),
    [
        (None, NO_ALGORITHM, "LOADS", "LOADS"),
        (None, {}, "LOADS", "LOADS"),
        (NO_ALGORITHM, None, "LOADS", "REFUSED"),
        (FLAT_NULL, NO_ALGORITHM, "UNKNOWN", "UNKNOWN"),
        (None, CACHE_ALONE, "LOADS", "LOADS"),
        (CACHE_ALONE, None, "LOADS", "REFUSED"),
        ({**FLAT_NULL, **CACHE_ALONE["quantization"]}, None, "UNKNOWN", "UNKNOWN"),
        ({}, None, "LOADS", "REFUSED"),
        ({"quant_method": ""}, None, "LOADS", "REFUSED"),
        ({"quant_method": None}, None, "REFUSED", "REFUSED"),
    ],
)
def test_a_declaration_without_an_algorithm_is_that_of_a_bf16_draft(
    declared: Any, beside: Any, vllm: str, sglang: str, draft: Path, tmp_path: Path
) -> None:
    """As NVIDIA published one; the verdicts were executed."""
    folder = shutil.copytree(draft, tmp_path / "bf16")
    config = config_of(folder)
    if declared is not None:
        config["quantization_config"] = declared
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if beside is not None:
        (folder / HF_QUANT_CONFIG).write_text(json.dumps(beside), encoding="utf-8")
    for engine, verdict in (("vllm", vllm), ("sglang", sglang)):
        assert check_draft(folder, engine=engine, arch="sm90").verdict == verdict  # type: ignore[arg-type]
    assert declared_scheme(Checkpoint.open(folder)) is None
    if declared is not FLAT_NULL and beside is not CACHE_ALONE:
        return
    out = tmp_path / "out"
    assert main(["quantize", str(folder), "--recipe", "fp8-ptpc", "--out", str(out)]) == 0
    assert not (out / HF_QUANT_CONFIG).exists()
    assert main(["verify", str(out), "--against", str(folder)]) == 0
    assert main(["dequantize", str(folder), "--out", str(tmp_path / "plain")]) == 2


def test_nvfp4_of_groups_without_activations_is_weight_only(flat: Folders, tmp_path: Path) -> None:
    """Of an engine without the input scales `check` knows nothing."""
    out = Path(shutil.copytree(flat["blackwell-nvfp4"], tmp_path / "out"))
    edit_declaration(out, lambda d: d["config_groups"]["group_0"].pop("input_activations"))
    tensors = {n: t for n, t in read_tensors(out).items() if not n.endswith("input_scale")}
    write_tensors(out, tensors)
    assert scheme_of(out).activations == "none"
    for engine in ("vllm", "sglang"):
        assert check_draft(out, engine=engine, arch="sm90").verdict == "UNKNOWN"  # type: ignore[arg-type]
