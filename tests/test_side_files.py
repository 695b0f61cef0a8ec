"""What travels beside the tensors: files of the folder, links that stay in it, and no weights."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from tiny import tiny_eagle3_llama
from tiny_mtp import tiny_mimo_mtp


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
    found = side_files(snapshot)
    assert {"tokenizer.json", "sub/vocab.txt"} <= set(found)
    out = tmp_path / "out"
    assert main(["quantize", str(snapshot), "--recipe", "int4-channel", "--out", str(out)]) == 0
    other = tmp_path / "models--owner--other" / "blobs"
    other.mkdir(parents=True)
    (other / "secret").write_text("of another repository", encoding="utf-8")
    (snapshot / "vocab.txt").symlink_to(other / "secret")
    with pytest.raises(CheckpointError, match="elsewhere"):
        side_files(snapshot)


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # its path may be long
        server.bind(path.name)


BAD: tuple[tuple[Callable[[Path], object], str], ...] = (
    (lambda path: path.symlink_to("/etc/passwd"), "a link to /etc/passwd, elsewhere"),
    (lambda path: path.symlink_to("absent"), "a link to absent, which leads nowhere"),
    (lambda path: path.symlink_to(path.name), "which leads nowhere"),
    (lambda path: path.symlink_to("/etc"), "a link to /etc, which is no file"),
    (lambda path: path.symlink_to("/dev/zero"), "a link to /dev/zero, which is no file"),
    (os.mkfifo, "neither a file nor a folder"),
    (socket_at, "neither a file nor a folder"),
)


def test_what_is_no_file_of_the_folder_is_an_error(
    draft: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(draft.parent)  # which the socket changes
    path = draft / "vocab.txt"
    for make, what in BAD:
        make(path)
        with pytest.raises(CheckpointError) as caught:
            side_files(draft)
        assert caught.value.where == str(path)
        assert what in caught.value.what
        if make is not socket_at:
            path.unlink()
    assert quantized(draft) == 2
    assert "expected a file of the folder" in capsys.readouterr().err
    assert not (draft.parent / "out").exists()


SHARDED = ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")


def test_what_is_read_by_its_name_is_no_link_out_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        said = capsys.readouterr().err
        assert f"{file}: expected a file of the folder, got a link to {outside}, elsewhere" in said
        if file in SHARDED:
            with pytest.raises(CheckpointError, match="elsewhere"):
                Checkpoint.open(draft)
            assert Checkpoint.open(draft, is_target=True).tensors  # the user's own may be linked
            (draft / file).unlink()
            outside.rename(draft / "of the folder")
            (draft / file).symlink_to("of the folder")
            assert Checkpoint.open(draft).tensors


def test_the_code_beside_a_subtree_is_no_link_out_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, out = tiny_mimo_mtp(tmp_path / "target", inside_target=True), tmp_path / "out"
    (tmp_path / "secret").write_text("of the machine", encoding="utf-8")
    (target / "modeling_x.py").symlink_to(tmp_path / "secret")
    (target / "notes.txt").symlink_to(tmp_path / "secret")  # does not travel, and is not looked at
    part = ["--subtree", "model.mtp_layers.0", "--recipe", "fp8-ptpc", "--out", str(out)]
    assert main(["quantize", str(target), *part]) == 2
    said = capsys.readouterr().err
    assert "modeling_x.py: expected a file of the folder, got a link to" in said
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
