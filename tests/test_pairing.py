"""The candidate is the baseline, quantized: by hashes where there is a record, else by weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify.verification import verify
from draftquant.recipes.errors import CheckpointError, GateError
from draftquant.scripts.cli import main
from draftquant.validate.judging.candidate_origin import DraftFolder, check_folders, check_loaded
from tiny import Stored, bf16_bits, edit_json, tiny_eagle3_llama, values_of
from verify_cases import edit, edit_declaration


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafts; the first one's FP8, INT4 and dequantized folders; FP8 of both without record."""
    folder = tmp_path_factory.mktemp("pairing")
    tiny_eagle3_llama(folder / "draft")
    tiny_eagle3_llama(folder / "other", seed=7)
    for recipe, source, out in (
        ("fp8-ptpc", "draft", "fp8"),
        ("int4-channel", "draft", "int4"),
        ("fp8-ptpc", "other", "foreign-other"),
    ):
        arguments = ["quantize", str(folder / source), "--recipe", recipe]
        assert main([*arguments, "--backend", "torch", "--out", str(folder / out)]) == 0
    assert main(["dequantize", str(folder / "int4"), "--out", str(folder / "plain")]) == 0
    shutil.copytree(folder / "fp8", folder / "foreign")
    for foreign in ("foreign", "foreign-other"):
        (folder / foreign / "draftquant.json").unlink()
    return folder


def check(work: Path, baseline: str, candidate: str, *, unrelated: bool = False) -> tuple[str, ...]:
    folders = [DraftFolder.read(work / name) for name in (baseline, candidate)]
    warnings = check_folders(*folders, unrelated=unrelated)
    loaded = [load_draft(work / name) for name in (baseline, candidate)]
    return warnings + check_loaded(*loaded, folders[1], unrelated=unrelated)


@pytest.mark.parametrize("candidate", ["fp8", "int4", "plain"])
def test_what_was_made_of_the_baseline_is_accepted(work: Path, candidate: str) -> None:
    assert check(work, "draft", candidate) == ()


def test_anything_else_is_refused(work: Path) -> None:
    for baseline, candidate in (
        *(("fp8", "draft"), ("plain", "int4"), ("draft", "draft"), ("draft", "other")),
        *(("other", "fp8"), ("draft", "foreign-other")),
    ):
        with pytest.raises(GateError):
            check(work, baseline, candidate)


def test_digests_of_another_source_take_three_lines(work: Path) -> None:
    said = [str(one) for one in verify(work / "fp8", work / "other").faults]
    first, second, more = (one for one in said if "source.tensor_digests" in one)
    for line, name in ((first, "embed_tokens"), (second, "fc")):
        assert line.startswith(f"draftquant.json: source.tensor_digests.{name}.weight: expected bl")
    assert more.endswith("tensor_digests of 12 more tensors: expected as computed, got others")


def test_without_a_record_the_verdict_says_so(work: Path) -> None:
    (warning,) = check(work, "draft", "foreign")
    assert warning.startswith("the candidate has no draftquant.json, so nothing shows which")


def test_an_edited_record_or_declaration_is_refused(work: Path, tmp_path: Path) -> None:
    """Prompts cut out of the record, inputs that are not rounded, the record of another draft."""
    edited = Path(shutil.copytree(work / "fp8", tmp_path / "edited"))
    edit_declaration(edited, lambda d: d["config_groups"]["group_0"].update(input_activations=None))
    with pytest.raises(GateError):
        DraftFolder.read(edited)
    edit_json(edited / "draftquant.json", calibration_prompts=["0" * 64])
    with pytest.raises(CheckpointError):
        DraftFolder.read(edited)
    shutil.copytree(work / "foreign-other", tmp_path / "forged")
    shutil.copy(work / "fp8" / "draftquant.json", tmp_path / "forged")
    changes: dict[str, Any] = {
        "less": lambda tensors: tensors.pop("norm.weight"),
        "more": lambda tensors: tensors.update(extra=tensors["norm.weight"]),
    }
    for name, change in changes.items():
        edit(Path(shutil.copytree(work / "fp8", tmp_path / name)), change)
    for name in ("forged", *changes):
        with pytest.raises(GateError, match=r"draftquant.json belongs to other tensors"):
            DraftFolder.read(tmp_path / name)


LINEAR = "midlayer.mlp.up_proj.weight"
CHANGED: dict[str, tuple[str, Callable[[Stored], Stored], str]] = {
    "of another draft": (LINEAR, lambda old: old._replace(data=old.data[::-1]), "up_proj.weight h"),
    "nothing": (LINEAR, lambda old: old._replace(data=bytes(len(old.data))), "a cosine of nan"),
    "other fc": ("fc.weight", lambda old: scaled(old, 1.5), "fc.weight differs"),
    "folded": ("norm.weight", lambda old: scaled(old, 1.5), ""),
}


def scaled(old: Stored, factor: float) -> Stored:
    return old._replace(data=bf16_bits(factor * values_of(old)).tobytes())


@pytest.mark.parametrize("how", CHANGED)
def test_weights_decide_where_there_is_no_record(work: Path, tmp_path: Path, how: str) -> None:
    """A linear, the fc, and a norm, into which other tools fold scales, are not the baseline's."""
    folder = Path(shutil.copytree(work / "foreign", tmp_path / "candidate"))
    name, change, said = CHANGED[how]
    edit(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    if not said:
        assert len(check(work, "draft", str(folder))) == 1
        return
    with pytest.raises(GateError, match=f"was not quantized from the baseline: .*{said}"):
        check(work, "draft", str(folder))
