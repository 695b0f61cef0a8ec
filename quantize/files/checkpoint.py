"""A checkpoint: a draft folder seen through its config, its index and its headers.

Opening one reads no tensor data, so a 6 GB draft opens in milliseconds. It knows bytes and names,
not what a tensor is for (`drafts/` does) nor what becomes of it (`plan.py` does).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import reason
from ...recipes.regular_file import open_regular, read_text
from ...recipes.strict_json import JsonProblem, parse_json
from ..errors import CheckpointError
from .files_of_folder import SIGNATURE_FILE, check_own, files_of
from .not_a_draft import mistaken_folder, without_safetensors
from .safetensors_header import Header, TensorInfo, read_header
from .stacked import unstacked
from .subtree import names_below, shards_of

INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
UNVERIFIED = ".unverified"
"""Behind the name of the last file: what is staged looks like nothing that could be loaded."""
UNVERIFIED_CONFIG_FILE = CONFIG_FILE + UNVERIFIED  # in staging: no engine takes it for a checkpoint
PROVENANCE_FILE = "draftquant.json"
BLOCK_BYTES = 1 << 20
"""Read at once where nothing else says how much: two such blocks fit the cache of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One draft folder.

    Attributes:
        folder: where it lies.
        config: the parsed config.json.
        tensors: by name, sorted by name; experts that are stacked one by one, see `stacked`.
        headers: one per safetensors file, by file name.
        index: the parsed model.safetensors.index.json, None for a single file.
        subtree: the tensors are those below this prefix, or these, with commas between them, and
            nothing else of the folder is looked at: config.json is that of the model which they
            are a part of. None = it is whole.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    headers: Mapping[str, Header]
    index: Mapping[str, Any] | None
    subtree: str | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        config_file: str = CONFIG_FILE,
        subtree: str | None = None,
        is_target: bool = False,
    ) -> "Checkpoint":
        """Read config, index and headers of a draft folder.

        Args:
            folder: where it lies.
            config_file: `UNVERIFIED_CONFIG_FILE` for one that is staged.
            subtree: read only the tensors below this prefix, or these, with commas between them,
                and only the shards that hold them.
            is_target: it is the user's own target, of which nothing is written anywhere: its files
                may be links out of the folder.

        Raises:
            CheckpointError: something is absent, unreadable, a link out of the folder, doubled or
                contradicts something else.
        """
        if not folder.is_dir():
            raise CheckpointError(folder, "no such folder", fix="give a draft folder or a Hub id")
        if not (folder / config_file).exists() and (mistake := mistaken_folder(folder)):
            raise CheckpointError(folder, mistake[0], fix=mistake[1])
        if not is_target:
            check_own(folder, config_file)
            check_own(folder, INDEX_FILE)
        config = read_json_object(folder / config_file, no_config(folder))
        index = None
        if (folder / INDEX_FILE).exists():
            index = read_json_object(folder / INDEX_FILE, "export the index again")
            if subtree is not None:
                _check_weight_map(folder, index)
                index = shards_of(names_below(subtree, index["weight_map"], folder), index)
        files = (
            _files_of_index(folder, index, whole=subtree is None)
            if index is not None
            else [_single_file(folder)]
        )
        if not is_target:
            for file in files:
                check_own(folder, file)
        headers = {file: read_header(folder, file) for file in files}
        if subtree is not None:
            stored = [tensor.name for header in headers.values() for tensor in header.tensors]
            below = names_below(subtree, stored, folder)
            headers = {file: header.only(below) for file, header in headers.items()}
        if index is not None:
            _check_index(folder, index["weight_map"], _by_name(folder, headers))
        headers = {file: unstacked(header) for file, header in headers.items()}
        tensors = _by_name(folder, headers)
        return cls(
            folder=folder,
            config=config,
            tensors=dict(sorted(tensors.items())),
            headers=headers,
            index=index,
            subtree=subtree,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, headers not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def side_files(self) -> tuple[str, ...]:
        """Every other file of the folder (tokenizer, mask_embedding.pt), relative, sorted.

        Of a subtree only code that config.json may name: all else belongs to the whole model.

        Raises:
            CheckpointError: one of them is a link out of the folder, or no file at all.
        """
        if self.subtree is not None:
            return tuple(files_of(self.folder, skip=_is_no_code))
        own = {CONFIG_FILE, INDEX_FILE, SIGNATURE_FILE, *self.headers}
        found = files_of(
            self.folder, skip=lambda file: file in own or Path(file).parts[0] in HIDDEN
        )
        return tuple(sorted(found))


HIDDEN = {".git", ".cache", "__pycache__"}  # leftovers of download tools, not part of a draft


def _is_no_code(file: str) -> bool:
    return "/" in file or not file.endswith(".py")


@contextmanager
def open_weights(path: Path) -> Iterator[int]:
    """A descriptor of a file of tensors whose header was read.

    Raises:
        CheckpointError: it vanished, or cannot be read any more.
    """
    try:
        descriptor = open_regular(path)
    except OSError as exc:
        raise CheckpointError(
            path, f"cannot be read: {reason(exc)}", fix="check the folder"
        ) from exc
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def pread_exactly(descriptor: int, buffer: memoryview, offset: int, where: object) -> None:
    """Fill `buffer` from `offset` of an open file.

    Raises:
        CheckpointError: the file ends before the buffer is full (it shrank while being read).
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise CheckpointError(
                where,
                f"ends before byte {offset + len(buffer)}",
                fix="run again: the file changed while it was read",
            )
        done += count


def byte_blocks(checkpoint: Checkpoint, tensor: TensorInfo) -> Iterator[memoryview]:
    """The bytes of a tensor, block by block, in one buffer: use each before the next.

    Raises:
        CheckpointError: its file shrank or vanished while being read.
    """
    path = checkpoint.folder / tensor.file
    buffer = memoryview(bytearray(min(BLOCK_BYTES, tensor.nbytes)))
    with open_weights(path) as descriptor:
        for start in range(tensor.start, tensor.stop, BLOCK_BYTES):
            block = buffer[: tensor.stop - start]
            pread_exactly(descriptor, block, start, path)
            yield block


def no_config(folder: Path) -> str:
    """What to do about a folder without config.json."""
    return f"copy the draft's config.json into {folder}, or give the folder that has it"


def read_json_object(path: Path, fix: str) -> dict[str, Any]:
    """Read a file that must hold one JSON object.

    Raises:
        CheckpointError: absent, with the fix that is given; unreadable, too large, not JSON, or
            not an object.
    """
    again = "correct it, or download or export the file again"
    try:
        value = parse_json(read_text(path))
    except FileNotFoundError as exc:
        raise CheckpointError(path, "no such file", fix=fix) from exc
    except (OSError, JsonProblem) as exc:
        what = f"not readable as JSON: {reason(exc)}"
        raise CheckpointError(path, what, fix=again) from exc
    if not isinstance(value, dict):
        what = f"expected a JSON object, got {type(value).__name__}"
        raise CheckpointError(path, what, fix=again)
    return value


def _single_file(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            folder,
            f"{len(found)} safetensors files but no {INDEX_FILE}",
            fix="add the index, or keep one file",
        )
    what, fix = without_safetensors(folder)
    raise CheckpointError(folder, what, fix=fix)


def _check_weight_map(folder: Path, index: Mapping[str, Any]) -> None:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        where = folder / INDEX_FILE
        raise CheckpointError(where, "weight_map is missing or empty", fix="export the index again")


def _files_of_index(folder: Path, index: Mapping[str, Any], *, whole: bool) -> list[str]:
    """The shards that an index names, which are there, and unless it is of a part, no others."""
    where = folder / INDEX_FILE
    _check_weight_map(folder, index)
    weight_map = index["weight_map"]
    if not isinstance(index.get("metadata", {}), dict):
        raise CheckpointError(where, "metadata is not an object", fix="export the index again")
    files = sorted({str(file) for file in weight_map.values()})
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                where,
                f"weight_map: {file!r} is no safetensors file beside it",
                fix="export the index again",
            )
        if file not in present:
            raise CheckpointError(
                where,
                f"weight_map names {file!r}, which is not in the folder",
                fix="download the missing shard",
            )
    unlisted = sorted(present.difference(files)) if whole else []
    if unlisted:
        raise CheckpointError(
            where,
            f"the shard {unlisted[0]!r} is missing from the index",
            fix="add its tensors to weight_map, or remove the shard",
        )
    return files


def _by_name(folder: Path, headers: Mapping[str, Header]) -> dict[str, TensorInfo]:
    """All tensors of some files.

    Raises:
        CheckpointError: two of them have one name.
    """
    tensors: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise CheckpointError(
                    folder / file,
                    f"{tensor.name} also stands in {tensors[tensor.name].file}",
                    fix="remove the stale shard",
                )
            tensors[tensor.name] = tensor
    return tensors


def _check_index(
    folder: Path, weight_map: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> None:
    where = folder / INDEX_FILE
    for name in sorted(weight_map.keys() | tensors.keys()):
        if name not in tensors:
            raise CheckpointError(where, f"{name} stands in no shard", fix="export the index again")
        if weight_map.get(name) != tensors[name].file:
            raise CheckpointError(
                where,
                f"{name}: expected in {weight_map.get(name)!r}, found in {tensors[name].file!r}",
                fix="export the index again",
            )
