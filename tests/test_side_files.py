"""What travels beside the tensors: files of the folder, links that stay in it, and no weights."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.verify import verify
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from tiny import tiny_eagle3_llama
from tiny_mtp import tiny_mimo_mtp
from verify_cases import assert_only_fault, reseal


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft")


def side_files(folder: Path) -> tuple[str, ...]:
    return Checkpoint.open(folder).side_files()


def quantized(draft: Path) -> int:
    out = draft.parent / "out"
    return main(["quantize", str(draft), "--recipe", "int4-channel", "--out", str(out)])


def test_a_snapshot_of_the_hub_links_to_blobs(tmp_path: Path) -> None:
    """As huggingface_hub lays out its cache: every file of a snapshot is a link."""
    repository = tmp_path / "models--owner--draft"
    snapshot = repository / "snapshots" / "abc"
    plain = tiny_eagle3_llama(tmp_path / "plain")
    (plain / "sub").mkdir()
    (plain / "sub" / "vocab.txt").write_text("words", encoding="utf-8")
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in plain.rglob("*") if p.is_file())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.move(path, blob)
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    assert {"tokenizer.json", "sub/vocab.txt"} <= set(side_files(snapshot))
    out = tmp_path / "out"
    assert main(["quantize", str(snapshot), "--recipe", "int4-channel", "--out", str(out)]) == 0
    other = tmp_path / "models--owner--other" / "blobs"
    other.mkdir(parents=True)
    (other / "secret").write_text("of another repository", encoding="utf-8")
    (snapshot / "vocab.txt").symlink_to(other / "secret")
    with pytest.raises(CheckpointError, match="elsewhere"):
        side_files(snapshot)
    (snapshot / "vocab.txt").unlink()
    with pytest.raises(CheckpointError, match="elsewhere"):
        side_files(repository.rename(tmp_path / "no repository") / "snapshots" / "abc")


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # its path may be long
        server.bind(path.name)


def test_what_is_no_own_file_is_an_error(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(draft.parent)  # which the socket changes
    path = draft / "vocab.txt"
    for make in (
        lambda path: path.symlink_to("/etc/passwd"), lambda path: path.symlink_to("absent"),
        lambda path: path.symlink_to(path.name), lambda path: path.symlink_to("/etc"),
        lambda path: path.symlink_to("/dev/zero"), os.mkfifo, socket_at,
    ):  # fmt: skip
        make(path)
        with pytest.raises(CheckpointError) as caught:
            side_files(draft)
        assert caught.value.where == str(path)
        if make is not socket_at:
            path.unlink()
    assert quantized(draft) == 2
    assert not (draft.parent / "out").exists()


SHARDED = ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")


def test_what_is_read_by_its_name_is_no_link_out_of_the_folder(tmp_path: Path) -> None:
    for number, file in enumerate((*SHARDED, "draftquant.json")):
        (tmp_path / str(number)).mkdir()
        draft = tiny_eagle3_llama(tmp_path / str(number) / "draft", sharded=True)
        outside = draft.parent / "elsewhere"
        if (draft / file).exists():
            (draft / file).rename(outside)
        else:
            outside.write_text("{}", encoding="utf-8")
        (draft / file).symlink_to(outside)
        assert quantized(draft) == 2
        if file in SHARDED:
            with pytest.raises(CheckpointError, match="elsewhere"):
                Checkpoint.open(draft)
            assert Checkpoint.open(draft, is_target=True).tensors  # the user's own may be linked
            (draft / file).unlink()
            outside.rename(draft / "of the folder")
            (draft / file).symlink_to("of the folder")
            assert Checkpoint.open(draft).tensors


def test_the_code_beside_a_subtree_is_no_link_out_of_the_folder(tmp_path: Path) -> None:
    target, out = tiny_mimo_mtp(tmp_path / "target", inside_target=True), tmp_path / "out"
    (tmp_path / "secret").write_text("of the machine", encoding="utf-8")
    (target / "modeling_x.py").symlink_to(tmp_path / "secret")
    (target / "notes.txt").symlink_to(tmp_path / "secret")  # does not travel, and is not looked at
    part = ["--subtree", "model.mtp_layers.0", "--recipe", "fp8-ptpc", "--out", str(out)]
    assert main(["quantize", str(target), *part]) == 2
    assert not out.exists()
    (target / "modeling_x.py").unlink()
    (target / "modeling_x.py").write_text("code = 1", encoding="utf-8")
    assert main(["quantize", str(target), *part]) == 0
    assert (out / "modeling_x.py").read_text(encoding="utf-8") == "code = 1"
    assert not (out / "notes.txt").exists()


def test_a_signature_belongs_to_one_folder(draft: Path) -> None:
    """What `model_signing` writes beside the files: no stray, and of no output made from them."""
    (draft / "model.sig").write_text("{}", encoding="utf-8")
    assert "model.sig" not in side_files(draft)
    assert quantized(draft) == 0
    out, plain = draft.parent / "out", draft.parent / "plain"
    assert not (out / "model.sig").exists()
    (out / "model.sig").write_text("{}", encoding="utf-8")
    assert main(["verify", str(out), "--against", str(draft)]) == 0
    assert main(["dequantize", str(out), "--out", str(plain)]) == 0
    assert not (plain / "model.sig").exists()


# ---- every file of an output belongs to somebody; what does not is a fault, as an edited record is


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """draft/ and int4/."""
    folder = tmp_path_factory.mktemp("owned")
    draft, out = tiny_eagle3_llama(folder / "draft"), folder / "int4"
    assert main(["quantize", str(draft), "--recipe", "int4-channel", "--out", str(out)]) == 0
    return folder


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "int4", tmp_path / "out"))


FILES = {
    "pytorch_model.bin", "model.gguf", "evil.py", "mask_embedding.pt", "adapter_config.json",
    "sub/notes.txt", "config.json.unverified", "hf_quant_config.json", ".hidden",
}  # fmt: skip
OF_TOOLS = {
    "added_tokens.json", "generation_config.json", "special_tokens_map.json",
    "tokenizer_config.json", "chat_template.jinja", "quant_config.json", "quant_log.csv",
    "quantization_config.json", "quantize_config.json", "recipe.yaml",
}  # fmt: skip
"""What transformers and quantizers write beside weights, the tokenizer's files in their words."""
PUBLISHED = {".gitattributes", "model.sig", "speculation_profile.json", ".cache/huggingface/a"}
HIDDEN = {f"{folder}/" for folder in (".git", ".cache", "__pycache__")}


@pytest.mark.parametrize("foreign", [False, True])
def test_a_file_that_nobody_owns(foreign: bool, made: Path, out: Path) -> None:
    for file in FILES | OF_TOOLS | PUBLISHED | {f"{folder}a" for folder in HIDDEN}:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_text("{}", encoding="utf-8")
    if foreign:
        (out / "draftquant.json").unlink()
    found = {each.where: each.got for each in verify(out, made / "draft", foreign=foreign).faults}
    assert found.keys() == FILES | HIDDEN | (set() if foreign else OF_TOOLS)
    assert found.pop("tokenizer_config.json", "other bytes") == "other bytes"
    assert {found.pop(folder) for folder in HIDDEN} == {f"{folder}a in it" for folder in HIDDEN}
    assert {*found.values()} == {"a file of neither the source nor the layout"}


def test_what_is_no_file(made: Path, out: Path) -> None:
    (out / "link.txt").symlink_to("absent")
    os.mkfifo(out / "pipe")
    (out / "folder").symlink_to("/etc")
    assert {fault.where: fault.got for fault in verify(out, made / "draft").faults} == {
        "link.txt": "a link to absent, which leads nowhere",
        "pipe": "neither a file nor a folder",
        "folder": "a link to /etc, which is no file",
    }


def test_an_own_file_that_is_a_link_elsewhere(made: Path, out: Path, tmp_path: Path) -> None:
    (out / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (out / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    assert_only_fault(verify(out, made / "draft"), "tokenizer.json", "expected a file of the fold")


def test_side_files_are_owned_and_weights_are_not(made: Path, out: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(made / "draft", tmp_path / "draft"))
    for file in ("weights.pt", "modeling.py"):
        (draft / file).write_text("the same", encoding="utf-8")
        (out / file).write_text("the same", encoding="utf-8")
    assert [fault.where for fault in verify(out, draft).faults] == ["weights.pt"]


def test_a_folder_without_a_record_is_foreign_if_somebody_says_so(made: Path, out: Path) -> None:
    (out / "draftquant.json").unlink()
    command = ["verify", str(out), "--against", str(made / "draft")]
    assert main(command) == 1
    assert main([*command, "--foreign"]) == 0


# ---- the record

Edit = Callable[[dict[str, Any]], object]
EDITS: dict[str, tuple[Edit, str]] = {
    "hash of nothing": (
        lambda d: d["tensor_digests"].update({"of.others": "00"}), "tensor_digests.of.others",
    ),
    "hashes of nothing": (
        lambda d: d["tensor_digests"].update({f"of.{n}": "00" for n in "abc"}),
        "tensor_digests.of.c",
    ),
    "no hash": (lambda d: d["tensor_digests"].pop("norm.weight"), "tensor_digests.norm.weight"),
    "argv": (lambda d: d.update(argv=["me"]), "sha256"),
    "no seal": (lambda d: d.pop("sha256"), "sha256"),
}  # fmt: skip
"""Beside those of `damages`: told/damages.txt has what is said of other hashes and sizes."""


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


def test_a_source_with_a_link_elsewhere_verifies_nothing(made: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(made / "draft", tmp_path / "draft"))
    (draft / "vocab.txt").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="expected a file of the folder"):
        verify(made / "int4", draft)
