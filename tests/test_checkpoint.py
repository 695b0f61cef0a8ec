"""Draft folders as hostile input: index, config, side files; headers have a file of their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.files.checkpoint import INDEX_FILE, Checkpoint
from draftquant.quantize.files.digests import Digest, tensor_digests
from draftquant.quantize.files.hub import resolve_draft
from draftquant.recipes.errors import CheckpointError
from tiny import edit_json, tiny_eagle3_llama, write_safetensors

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft", sharded=True)


def refused(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert caught.value.where.startswith(str(folder))


def edit_map(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


IMPOSSIBLE = ("../x.safetensors", "/etc/x.safetensors", "", "x.bin", None)
INDEXES: list[Callable[[Path], object]] = [
    lambda f: write_safetensors(f / "stale.safetensors", {}),
    lambda f: (f / SHARDS[1]).unlink(),
    *(lambda f, file=file: edit_map(f, lambda m: m.update(d2t=file)) for file in IMPOSSIBLE),
    lambda f: edit_map(f, lambda m: m.update({"fc.weight": SHARDS[0]})),
    lambda f: edit_map(f, lambda m: m.pop("midlayer.input_layernorm.weight")),
    lambda f: edit_map(f, lambda m: m.update(d2t=SHARDS[0])),
    lambda f: (f / SHARDS[1]).write_bytes((f / SHARDS[0]).read_bytes()),
    *(lambda f, none=none: edit_json(f / INDEX_FILE, weight_map=none) for none in ({}, [], "x")),
    lambda f: edit_json(f / INDEX_FILE, metadata=[]),
]


@pytest.mark.parametrize("edit", INDEXES, ids=range(len(INDEXES)))
def test_an_index_of_other_shards(edit: Callable[[Path], object], sharded: Path) -> None:
    edit(sharded)
    refused(sharded)


@pytest.mark.parametrize("file", ["config.json", INDEX_FILE])
def test_json_file_that_is_no_object(file: str, sharded: Path) -> None:
    for content in (b"[]", b"", b"\x80\x04\x95", b"[" * 200_000):
        (sharded / file).write_bytes(content)
        refused(sharded)


def test_a_folder_without_what_is_read(draft: Path) -> None:
    write_safetensors(draft / "more.safetensors", {})
    refused(draft)
    (draft / "more.safetensors").unlink()
    for other in ("pytorch_model.bin", "draft.pt", "draft.pth", "draft.ckpt"):
        (draft / "model.safetensors").rename(draft / other)
        refused(draft)
        (draft / other).rename(draft / "model.safetensors")
    (draft / "config.json").unlink()
    refused(draft)


def test_a_pickle_alone_names_the_command_that_reads_it(tmp_path: Path) -> None:
    """Without config.json too, and given as a file."""
    folder = tmp_path / "old draft"
    folder.mkdir()
    (folder / "pytorch_model.bin").touch()
    for open_it in (
        lambda: Checkpoint.open(folder),
        lambda: resolve_draft(str(folder / "pytorch_model.bin")),
    ):
        with pytest.raises(CheckpointError) as caught:
            open_it()
        assert f"draftquant unpickle '{folder}' --out SAFETENSORS" in caught.value.fix


def test_every_tensor_is_digested_whole(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block, whatever their size; of no bytes by BLAKE3's own test vectors."""
    found = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert str(Digest()) == f"blake3:{found}"
    whole = tensor_digests(Checkpoint.open(draft))
    monkeypatch.setattr("draftquant.quantize.files.checkpoint.BLOCK_BYTES", 1000)
    assert tensor_digests(Checkpoint.open(draft)) == whole


def test_side_files_are_everything_else(sharded: Path) -> None:
    for file in ("tokenizer/vocab.json", "mask_embedding.pt", ".git/config", ".cache/x/y"):
        (sharded / file).parent.mkdir(parents=True, exist_ok=True)
        (sharded / file).write_text("", encoding="utf-8")
    (sharded / "empty").mkdir()
    tokenizer = ["tokenizer.json", "tokenizer/vocab.json", "tokenizer_config.json"]
    assert sorted(Checkpoint.open(sharded).side_files()) == ["mask_embedding.pt", *tokenizer]
