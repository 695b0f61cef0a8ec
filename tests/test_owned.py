"""Every file of an output belongs to somebody; what does not is a fault, as an edited record is."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.rewritten import verify_dequantized
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from tiny import edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from verify_cases import assert_only_fault, reseal


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """draft/, int4/ and plain/, its weights dequantized."""
    folder = tmp_path_factory.mktemp("owned")
    draft, out = tiny_eagle3_llama(folder / "draft"), folder / "int4"
    assert main(["quantize", str(draft), "--recipe", "int4-channel", "--out", str(out)]) == 0
    assert main(["dequantize", str(out), "--out", str(folder / "plain")]) == 0
    return folder


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "int4", tmp_path / "out"))


FILES = (
    "pytorch_model.bin", "model.gguf", "evil.py", "mask_embedding.pt", "adapter_config.json",
    "sub/notes.txt", "config.json.unverified", "hf_quant_config.json", ".hidden",
)  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_nobody_owns(file: str, foreign: bool, made: Path, out: Path) -> None:
    (out / file).parent.mkdir(exist_ok=True)
    (out / file).write_text("{}", encoding="utf-8")
    report = verify(out, made / "draft", foreign=foreign)
    assert_only_fault(report, file, "got a file of neither the source nor the layout")


def test_what_is_no_file(made: Path, out: Path) -> None:
    (out / "link.txt").symlink_to("absent")
    os.mkfifo(out / "pipe")
    (out / "folder").symlink_to("/etc")
    found = {fault.where: fault.got for fault in verify(out, made / "draft").faults}
    assert found == {
        "link.txt": "a link to absent, which leads nowhere",
        "pipe": "neither a file nor a folder",
        "folder": "a link to /etc, which is no file",
    }


def test_an_own_file_that_is_a_link_elsewhere(made: Path, out: Path, tmp_path: Path) -> None:
    (out / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (out / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    assert_only_fault(verify(out, made / "draft"), "tokenizer.json", "expected a file of the fold")


@pytest.mark.parametrize("name", [".git", "__pycache__", ".cache"])
def test_hidden_folders_are_named_once(name: str, made: Path, out: Path) -> None:
    (out / name).mkdir()
    for number in range(3):
        (out / name / f"{number}").write_text("", encoding="utf-8")
    assert_only_fault(verify(out, made / "draft"), f"{name}/", "expected no such folder")


def test_what_the_hub_adds_is_no_fault(made: Path, out: Path) -> None:
    (out / ".cache" / "huggingface" / "download").mkdir(parents=True)
    (out / ".cache" / "huggingface" / "download" / "config.json.metadata").write_text(
        "", encoding="utf-8"
    )
    (out / ".gitattributes").write_text("*.safetensors filter=lfs", encoding="utf-8")
    (out / "README.md").write_text("a card", encoding="utf-8")
    assert verify(out, made / "draft").faults == ()


@pytest.mark.parametrize("file", ["weights.pt", "modeling.py"])
def test_side_files_of_the_source_are_owned_and_its_weights_are_not(
    file: str, made: Path, out: Path, tmp_path: Path
) -> None:
    draft = Path(shutil.copytree(made / "draft", tmp_path / "draft"))
    (draft / file).write_text("the same", encoding="utf-8")
    (out / file).write_text("the same", encoding="utf-8")
    wheres = [fault.where for fault in verify(out, draft).faults]
    assert wheres == (["weights.pt"] if file == "weights.pt" else [])


METADATA: dict[str, tuple[dict[str, str], bool, list[str]]] = {
    "the source's": ({"format": "pt"}, False, []),
    "one key more": ({"format": "pt", "note": "x"}, False, ["__metadata__: note"]),
    "another value": ({"format": "tf"}, True, ["__metadata__: format"]),
    "one key more of another tool": ({"format": "pt", "note": "x"}, True, ["__metadata__: note"]),
    "none": ({}, True, ["__metadata__: format"]),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_that_of_the_source(name: str, made: Path, out: Path) -> None:
    metadata, foreign, wheres = METADATA[name]
    write_tensors(out, read_tensors(out), metadata=metadata)
    report = verify(out, made / "draft", foreign=foreign)
    assert [fault.where for fault in report.faults] == wheres


def test_a_folder_without_a_record_is_of_another_tool_only_if_somebody_says_so(
    made: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out / "draftquant.json").unlink()
    command = ["verify", str(out), "--against", str(made / "draft")]
    assert main(command) == 1
    assert "If another tool made the folder, pass --foreign" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main([*command, "--foreign"]) == 0


# ---- the record

Edit = Callable[[dict[str, Any]], object]
EDITS: dict[str, tuple[Edit, str]] = {
    "family": (lambda d: d["source"].update(family="eagle3-mla"), "source.family"),
    "bytes before": (lambda d: d["tensor_bytes"].update(before=1), "tensor_bytes.before"),
    "bytes after": (lambda d: d["tensor_bytes"].update(after=1), "tensor_bytes.after"),
    "hash": (
        lambda d: d["tensor_digests"].update({"norm.weight": "00"}),
        "tensor_digests.norm.weig",
    ),
    "argv": (lambda d: d.update(argv=["me"]), "sha256"),
    "Hub id": (lambda d: d["source"].update(hub_id="me/mine"), "sha256"),
    "version": (lambda d: d.update(draftquant="7"), "sha256"),
    "backend": (lambda d: d["backend_versions"].update(torch="0"), "sha256"),
    "no seal": (lambda d: d.pop("sha256"), "sha256"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_record_is_a_fault(name: str, made: Path, out: Path) -> None:
    change, key = EDITS[name]
    content = json.loads((out / "draftquant.json").read_text(encoding="utf-8"))
    change(content)
    (out / "draftquant.json").write_text(json.dumps(content), encoding="utf-8")
    wheres = [fault.where for fault in verify(out, made / "draft").faults]
    assert "draftquant.json: sha256" in wheres
    assert any(where.startswith(f"draftquant.json: {key}") for where in wheres)
    reseal(out)
    resealed = verify(out, made / "draft")
    assert resealed.ok == (key == "sha256")  # what can be computed again needs no seal


@pytest.mark.parametrize("verb", ["dequantize", "transcode --layout quark"])
def test_nothing_is_made_from_an_edited_record(
    verb: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(out / "draftquant.json", argv=["me"])
    assert main([*verb.split(), str(out), "--out", str(tmp_path / "made")]) == 2
    assert "draftquant.json: sha256: not that of the other keys" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


# ---- dequantized folders


def test_a_dequantized_folder_owns_its_files_too(made: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(made / "plain", tmp_path / "plain"))
    source = StoredDraft.read(Checkpoint.open(made / "int4"))
    (plain / "draftquant.json").unlink()  # written after this verification
    assert verify_dequantized(source, plain, "BF16").faults == []
    (plain / "evil.py").write_text("", encoding="utf-8")
    write_tensors(plain, read_tensors(plain), metadata={"format": "pt", "note": "x"})
    wheres = [fault.where for fault in verify_dequantized(source, plain, "BF16").faults]
    assert wheres == ["__metadata__: note", "evil.py"]


def test_a_source_with_a_link_elsewhere_verifies_nothing(made: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(made / "draft", tmp_path / "draft"))
    (draft / "vocab.txt").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="expected a file of the folder"):
        verify(made / "int4", draft)
