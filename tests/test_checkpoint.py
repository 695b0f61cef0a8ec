"""Draft folders as hostile input: index, config, side files; headers have a file of their own."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import INDEX_FILE, Checkpoint, byte_blocks
from draftquant.quantize.files.hub import resolve_draft
from draftquant.quantize.files.safetensors_file import open_files
from draftquant.quantize.lints.value_lints import half_ratios
from draftquant.quantize.stored.decoded_numbers import read_whole
from draftquant.recipes.errors import CheckpointError
from tiny import read_tensors, tiny_eagle3_llama, write_safetensors

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NORM = "midlayer.input_layernorm.weight"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft", sharded=True)


def refused(folder: Path, what: str, fix: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert caught.value.where.startswith(str(folder))
    assert what in caught.value.what
    assert fix in caught.value.fix


def edit_map(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    index["weight_map"] |= {name.replace("__", "."): file for name, file in changes.items()}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def test_single_file_and_shards_give_the_same_tensors(tmp_path: Path) -> None:
    single = Checkpoint.open(tiny_eagle3_llama(tmp_path / "single"))
    sharded = Checkpoint.open(tiny_eagle3_llama(tmp_path / "sharded", sharded=True))
    assert single.index is None
    assert sharded.index is not None
    assert tuple(sharded.headers) == SHARDS
    assert list(single.tensors) == list(sharded.tensors) == sorted(single.tensors)
    assert single.nbytes == sharded.nbytes
    for name, stored in read_tensors(single.folder).items():
        for checkpoint in (single, sharded):
            tensor = checkpoint.tensors[name]
            content = (checkpoint.folder / tensor.file).read_bytes()
            assert content[tensor.start : tensor.stop] == stored.data
            assert (tensor.dtype, tensor.shape) == (stored.dtype, stored.shape)


# index


def test_shard_missing_from_the_index(sharded: Path) -> None:
    write_safetensors(sharded / "stale.safetensors", {})
    refused(sharded, "'stale.safetensors' is missing from the index", "or remove the shard")


def test_index_names_a_missing_shard(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    refused(sharded, f"names {SHARDS[1]!r}, which is not in the folder", "download the missing")


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.bin", None, 7, []],
)
def test_index_names_no_safetensors_file_of_the_folder(file: object, sharded: Path) -> None:
    edit_map(sharded, d2t=file)
    refused(sharded, "is no safetensors file beside it", "export the index again")


def test_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    edit_map(sharded, fc__weight=SHARDS[0])
    refused(sharded, f"fc.weight: expected in {SHARDS[0]!r}, found in {SHARDS[1]!r}", "export")


def test_tensor_that_the_index_does_not_name(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text(encoding="utf-8"))
    del index["weight_map"][NORM]
    (sharded / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    refused(sharded, f"{NORM}: expected in None, found in", "export the index again")


def test_tensor_that_stands_in_no_shard(sharded: Path) -> None:
    edit_map(sharded, d2t=SHARDS[0])
    refused(sharded, "d2t stands in no shard", "export the index again")


def test_tensor_in_two_shards(sharded: Path) -> None:
    (sharded / SHARDS[1]).write_bytes((sharded / SHARDS[0]).read_bytes())
    refused(sharded, f"also stands in {SHARDS[0]}", "remove the stale shard")


@pytest.mark.parametrize("weight_map", [{}, [], None, "x", 7], ids=repr)
def test_weight_map_that_is_none(weight_map: object, sharded: Path) -> None:
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    refused(sharded, "weight_map is missing or empty", "export the index again")


@pytest.mark.parametrize("metadata", [[], None, "x"], ids=repr)
def test_metadata_of_the_index_that_is_no_object(metadata: object, sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text(encoding="utf-8"))
    (sharded / INDEX_FILE).write_text(json.dumps(index | {"metadata": metadata}), encoding="utf-8")
    refused(sharded, "metadata is not an object", "export the index again")


# JSON files

BAD_JSON = {
    "list": (b"[]", "expected a JSON object, got list"),
    "text": (b'"x"', "expected a JSON object, got str"),
    "null": (b"null", "expected a JSON object, got NoneType"),
    "empty": (b"", "not readable as JSON"),
    "cut": (b'{"a": ', "not readable as JSON"),
    "binary": (b"\x80\x04\x95", "not readable as JSON"),
    "nested": (b"[" * 200_000, "not readable as JSON"),
    "long number": (b"[" + b"9" * 5000 + b"]", "not readable as JSON"),
}


@pytest.mark.parametrize(("content", "what"), BAD_JSON.values(), ids=BAD_JSON.keys())
@pytest.mark.parametrize("file", ["config.json", INDEX_FILE])
def test_json_file_that_is_no_object(content: bytes, what: str, file: str, sharded: Path) -> None:
    (sharded / file).write_bytes(content)
    refused(sharded, what, "correct it, or download or export the file again")


def test_config_that_is_absent(draft: Path) -> None:
    (draft / "config.json").unlink()
    refused(draft, "no such file", f"copy the draft's config.json into {draft}")


# safetensors files of the folder


def test_two_files_without_an_index(draft: Path) -> None:
    write_safetensors(draft / "more.safetensors", {})
    refused(draft, f"2 safetensors files but no {INDEX_FILE}", "add the index")


@pytest.mark.parametrize("other", ["pytorch_model.bin", "draft.pt", "draft.pth", "draft.ckpt"])
def test_pickles_are_not_read(other: str, draft: Path) -> None:
    (draft / "model.safetensors").rename(draft / other)
    refused(draft, f"no safetensors file (found {other})", "pickled weights are not read")


def test_a_pickle_alone_names_the_command_that_reads_it(tmp_path: Path) -> None:
    """Without config.json too, and given as a file."""
    folder = tmp_path / "old draft"
    folder.mkdir()
    (folder / "pytorch_model.bin").touch()
    command = f"draftquant unpickle '{folder}' --out SAFETENSORS"
    for open_it in (
        lambda: Checkpoint.open(folder),
        lambda: resolve_draft(str(folder / "pytorch_model.bin")),
    ):
        with pytest.raises(CheckpointError) as caught:
            open_it()
        assert command in caught.value.fix


@pytest.mark.parametrize(
    "read",
    [
        lambda found: list(byte_blocks(found, found.tensors[NORM])),
        lambda found: read_whole(found, found.tensors[NORM]),
        lambda found: half_ratios(read_draft(found)),
        lambda found: open_files(ExitStack(), found, found.folder, {"model.safetensors": []}),
    ],
    ids=["blocks", "rows", "sampled rows", "whole files"],
)
def test_weights_that_vanish_behind_the_header(
    read: Callable[[Checkpoint], Any], draft: Path
) -> None:
    found = Checkpoint.open(draft)
    (draft / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        read(found)


# side files


def test_side_files_are_everything_else(sharded: Path) -> None:
    for file in ("tokenizer/vocab.json", "mask_embedding.pt", ".git/config", ".cache/x/y"):
        (sharded / file).parent.mkdir(parents=True, exist_ok=True)
        (sharded / file).write_text("", encoding="utf-8")
    (sharded / "empty").mkdir()
    found = Checkpoint.open(sharded).side_files()
    tokenizer = {"tokenizer.json", "tokenizer/vocab.json", "tokenizer_config.json"}
    assert set(found) == tokenizer | {"mask_embedding.pt"}
    assert len(found) == 4
