"""Pickled drafts as safetensors, by the command that the error names."""

import resource
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.safetensors_file import SafetensorsFile
from draftquant.quantize.making.unpickle_draft import unpickle_draft
from draftquant.recipes.errors import CheckpointError, VerifyError
from draftquant.scripts.cli import main
from safetensors.torch import load_file
from tiny import read_tensors, tiny_eagle3_llama


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "plain", pruned_vocabulary=True)


@pytest.fixture
def pickled(plain: Path, tmp_path: Path) -> Path:
    """The same draft as yuhuili's are published: config.json and pytorch_model.bin."""
    folder = tmp_path / "pickled"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes((plain / file).read_bytes())
    torch.save(load_file(plain / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


def test_its_command_makes_the_same_draft(plain: Path, pickled: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(pickled)
    name, *arguments = shlex.split(caught.value.fix.partition("(")[2].rstrip(")"))
    out = tmp_path / "out"
    assert name == "draftquant"
    assert arguments[-1] == "SAFETENSORS"
    assert main([*arguments[:-1], str(out)]) == 0
    assert read_tensors(out) == read_tensors(plain)
    assert (out / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    files = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == files
    assert read_draft(Checkpoint.open(out)).rows


class Harmful:
    """A pickle of this class runs code when an unpickler trusts it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


def test_what_is_not_tensors_by_name(
    pickled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    double = torch.zeros(1, dtype=torch.float64)
    named = {"model": {"a": torch.zeros(1)}}
    for saved in ({"a": Harmful()}, [torch.zeros(1)], named, {"a": double}):
        torch.save(saved, pickled / "pytorch_model.bin")
        with pytest.raises(CheckpointError) as caught:
            unpickle_draft(pickled, tmp_path / "out")
        assert caught.value.where == str(pickled / "pytorch_model.bin")
        assert not (tmp_path / "out").exists()
    assert "ran" not in capsys.readouterr().out


def test_views_stand_for_no_more_than_is_stored(pickled: Path, tmp_path: Path) -> None:
    wide, unstored = torch.ones(1).expand(2**20, 2**14), torch.ones(2**40, device="meta")
    one = torch.ones(1000)
    shared = {str(number): one if number % 2 else one[1:] for number in range(20)}
    for saved in ({"a": wide}, {"a": unstored}, shared):
        torch.save(saved, pickled / "pytorch_model.bin")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(CheckpointError):
            unpickle_draft(pickled, tmp_path / "out")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
        assert not (tmp_path / "out").exists()


def test_there_is_nothing_to_convert(plain: Path, pickled: Path, tmp_path: Path) -> None:
    def refused(folder: Path) -> None:
        with pytest.raises(CheckpointError):
            unpickle_draft(folder, tmp_path / "out")

    refused(plain)
    torch.save({"fc.weight": torch.zeros(1)}, pickled / "optimizer.pt")
    refused(pickled)
    (pickled / "model.safetensors").write_bytes(b"")
    refused(pickled)
    refused(tmp_path / "absent")
    (pickled / "config.json").unlink()
    refused(pickled)


@pytest.mark.parametrize("file", ["config.json", "notes.txt", "pytorch_model.bin"])
def test_a_link_out_of_the_folder(file: str, pickled: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    if (pickled / file).exists():
        (pickled / file).rename(secret)
    else:
        secret.write_text("x", encoding="utf-8")
    (pickled / file).symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"{file}: expected a file of the folder, got a link"):
        unpickle_draft(pickled, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_written_as_it_was_read_is_not_published(
    pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SafetensorsFile.write

    def damaged(file: SafetensorsFile, name: str, data: torch.Tensor) -> int:
        return write(file, name, data.flip(0) if name == "fc.weight" else data)

    monkeypatch.setattr(SafetensorsFile, "write", damaged)
    with pytest.raises(VerifyError, match=r"fc\.weight reads back differently"):
        unpickle_draft(pickled, tmp_path / "out")
    assert not (tmp_path / "out").exists()
