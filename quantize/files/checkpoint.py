"""A checkpoint: a draft folder seen through its config, its index and its headers, without data."""

import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import CheckpointError, reason
from ...recipes.regular_file import (
    MAX_DOCUMENT_BYTES,
    SIGNATURE_FILE,
    check_own,
    files_of,
    open_regular,
    read_text,
)
from ...recipes.strict_json import JsonProblem, parse_json, reading
from .safetensors_header import Header, TensorInfo, read_header

# Experts may be stacked in one tensor. Qwen3.5's MoE layers, and files that speculators and
# transformers 5 save, hold `experts.gate_up_proj` [E, 2 I, W], gate above up, and
# `experts.down_proj` [E, W, I]. Each expert's matrices are contiguous rows there, so they are named
# as in the released folders of Qwen3-Next, `experts.0.gate_proj.weight`, which vLLM 0.33 and SGLang
# 0.5.23 load (`experiments/engines/mtp.json`). The layout of gpt-oss, [E, W, 2 I] with gate and up
# alternating, has no such rows; no MTP layer has it.

_STACKED = re.compile(r"((?:mtp\.layers|mtp_layers)\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")
MOST_EXPERTS = 4096
"""No model's header claims more: each would become a tensor here."""
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def unstacked(header: Header) -> Header:
    """The header with a tensor for each matrix of each expert, where some are stacked."""
    tensors = tuple(part for tensor in header.tensors for part in _matrices(tensor))
    return dataclasses.replace(header, tensors=tensors)


def _matrices(tensor: TensorInfo) -> Iterator[TensorInfo]:
    match = _STACKED.fullmatch(tensor.name)
    parts = _PARTS[match[2]] if match else ()
    is_stacked = len(tensor.shape) == 3 and 0 < tensor.shape[0] <= MOST_EXPERTS and tensor.numel
    if match is None or not is_stacked or tensor.shape[1] % len(parts):
        yield tensor
        return
    experts, rows, columns = tensor.shape
    nbytes = tensor.nbytes // (experts * len(parts))
    for i in range(experts * len(parts)):
        expert, part = divmod(i, len(parts))
        start = tensor.start + i * nbytes
        yield dataclasses.replace(
            tensor,
            name=f"{match[1]}.{expert}.{parts[part]}.weight",
            shape=(rows // len(parts), columns),
            start=start,
            stop=start + nbytes,
        )


_MTP = re.compile(
    r"(.*\.eh_proj|model\.mtp_layers\.\d+\.input_proj|mtp\.fc)\.(weight(_packed)?|qweight)"
)
"""The linear with which an MTP layer, and no other layer, reads the embedding and the state."""


def mtp_layers(names: Collection[str]) -> tuple[str, ...]:
    """The prefixes of the MTP layers among the tensors of a target, sorted."""
    prefixes = (name.rsplit(".", 2)[0] for name in names if _MTP.fullmatch(name))
    return tuple(sorted(set(prefixes)))


MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys for the number of a target's MTP layers, as DeepSeek, Qwen and others spell them."""


def announced_mtp_layers(config: Mapping[str, Any]) -> int:
    """The number of MTP layers by config.json, whose language model may be a section."""
    sections = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    numbers = (section.get(key) for section in sections for key in MTP_KEYS)
    return next((number for number in numbers if type(number) is int and number > 0), 0)


def names_below(
    subtree: str, names: Collection[str], folder: Path, announced: int = 0
) -> frozenset[str]:
    """The names that begin with a prefix, or one of several between commas, and a dot.

    `announced`: the MTP layers that config.json promises.
    """
    selected: set[str] = set()
    for prefix in subtree.split(","):
        below = {name for name in names if name.startswith(f"{prefix}.")}
        if not below:
            there = ", ".join(mtp_layers(names))
            hint = f"give one of the MTP layers of this folder: {there}"
            fix = hint if there else "this folder has no MTP layer: give the one that has"
            what = f"no tensor lies below {prefix!r} (--subtree)"
            if announced and not there:
                what += f", and config.json announces {announced} MTP layer(s): engines refuse the"
                what += " folder as a draft, or serve memory that nothing was written to"
                fix += ", or put the layer back: draftquant graft TARGET LAYER --out O"
            raise CheckpointError(folder, what, fix=fix)
        selected |= below
    return frozenset(selected)


INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
UNVERIFIED = ".unverified"
"""Suffix of a staged file: nothing takes what is staged for something to load."""
UNVERIFIED_CONFIG_FILE = CONFIG_FILE + UNVERIFIED  # in staging: no engine loads the folder
PROVENANCE_FILE = "draftquant.json"
PROFILE_FILE = "speculation_profile.json"
"""What a draft accepts, measured: false for whatever is made of it."""
BLOCK_BYTES = 1 << 20
"""Bytes of one read by default: two such blocks fit the cache of a core."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """One draft folder, as it was when it was opened.

    Attributes:
        tensors: by name, sorted; each expert of a stacked tensor has its own entry.
        headers: by file. index: the parsed model.safetensors.index.json, None for a single file.
        subtree: only tensors below this prefix, or these with commas between them, are read;
            config.json is that of the model that contains them. None = it is whole.
        config_file: `UNVERIFIED_CONFIG_FILE` for a staged folder.
        roles: PATTERN=ROLE, what the user says of tensors of a draft that no family reads.
        stacks_experts: some are stored in one tensor.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    headers: Mapping[str, Header]
    index: Mapping[str, Any] | None
    subtree: str | None = None
    config_file: str = CONFIG_FILE
    roles: tuple[str, ...] = ()
    stacks_experts: bool = False

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        config_file: str = CONFIG_FILE,
        subtree: str | None = None,
        is_target: bool = False,
    ) -> "Checkpoint":
        """Read config, index and headers of a draft folder, or of the shards of a subtree.

        Args:
            is_target: it is the user's own target: its files may be links out of the folder.
        """
        if not folder.is_dir():
            raise CheckpointError(folder, "no such folder", fix="give a draft folder or a Hub id")
        if not (folder / config_file).exists() and (mistake := mistaken_folder(folder)):
            raise CheckpointError(folder, mistake[0], fix=mistake[1])
        check = check_own if not is_target else lambda _folder, _file: None
        check(folder, config_file)
        check(folder, INDEX_FILE)
        config = read_json_object(folder / config_file, no_config(folder))
        index = None
        if (folder / INDEX_FILE).exists():
            index = read_json_object(folder / INDEX_FILE, "export the index again")
            files = _files_of_index(folder, index, subtree)
        else:
            files = [_single_file(folder)]
        for file in files:
            check(folder, file)
        headers = {file: read_header(folder, file) for file in files}
        if subtree is not None:
            stored = [tensor.name for header in headers.values() for tensor in header.tensors]
            below = names_below(subtree, stored, folder, announced_mtp_layers(config))
            headers = {file: header.only(below) for file, header in headers.items()}
        if index is not None:
            _check_index(folder, index["weight_map"], _by_name(folder, headers))
        apart = {file: unstacked(header) for file, header in headers.items()}
        headers, stacks = apart, apart != headers
        return cls(
            folder=folder,
            config=config,
            tensors=dict(sorted(_by_name(folder, headers).items())),
            headers=headers,
            index=index,
            subtree=subtree,
            config_file=config_file,
            stacks_experts=stacks,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, without headers."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def side_files(self) -> tuple[str, ...]:
        """Every other file (tokenizer, mask_embedding.pt), sorted; for a subtree only code."""
        if self.subtree is not None:
            return tuple(files_of(self.folder, skip=lambda f: "/" in f or not f.endswith(".py")))
        handled = {CONFIG_FILE, INDEX_FILE, SIGNATURE_FILE, *self.headers}
        return tuple(
            sorted(files_of(self.folder, skip=lambda f: f in handled or Path(f).parts[0] in HIDDEN))
        )


HIDDEN = {".git", ".cache", "__pycache__"}  # leftovers of download tools, not part of a draft


CHANGED = "run again: the file changed while it was read"


@contextmanager
def open_weights(path: Path) -> Iterator[int]:
    """A descriptor of a file of tensors whose header was read."""
    with reading(path, CheckpointError, "check the folder"):
        descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def pread_exactly(descriptor: int, buffer: memoryview, offset: int, where: object) -> None:
    """Fill `buffer` from `offset` of an open file, which may have shrunk."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise CheckpointError(where, f"ends before byte {offset + len(buffer)}", fix=CHANGED)
        done += count


def byte_blocks(checkpoint: Checkpoint, tensor: TensorInfo) -> Iterator[memoryview]:
    """The bytes of a tensor, block by block, in one buffer: use each before the next."""
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


def read_json_object(
    path: Path,
    fix: str,
    *,
    again: str = "correct it, or download or export the file again",
    limit: int = MAX_DOCUMENT_BYTES,
) -> dict[str, Any]:
    """Read a file that must hold one JSON object, of bounded size; `fix` is for a missing file."""
    try:
        value = parse_json(read_text(path, limit))
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
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    many = f"{len(files)} safetensors files but no {INDEX_FILE}", "add the index, or keep one file"
    what, fix = many if files else without_safetensors(folder)
    raise CheckpointError(folder, what, fix=fix)


def _bad_index(folder: Path, what: str, fix: str = "export the index again") -> CheckpointError:
    return CheckpointError(folder / INDEX_FILE, what, fix=fix)


def _files_of_index(folder: Path, index: dict[str, Any], subtree: str | None) -> list[str]:
    """The shards that an index names; all exist, and for a whole index there are no others.

    For a part, the index keeps only the tensors below `subtree`.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(folder, "weight_map is missing or empty")
    if subtree is not None:  # no other shard needs to exist
        names = sorted(names_below(subtree, weight_map, folder))
        index["weight_map"] = {name: weight_map[name] for name in names}
    if not isinstance(index.get("metadata", {}), dict):
        raise _bad_index(folder, "metadata is not an object")
    files = sorted({str(file) for file in index["weight_map"].values()})
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise _bad_index(folder, f"weight_map: {file!r} is no safetensors file beside it")
        if file not in present:
            what = f"weight_map names {file!r}, which is not in the folder"
            raise _bad_index(folder, what, "download the missing shard")
    for unlisted in sorted(present.difference(files)) if subtree is None else ():
        what = f"the shard {unlisted!r} is missing from the index"
        raise _bad_index(folder, what, "add its tensors to weight_map, or remove the shard")
    return files


def _by_name(folder: Path, headers: Mapping[str, Header]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in tensors:
                what = f"{tensor.name} also stands in {tensors[tensor.name].file}"
                raise CheckpointError(folder / file, what, fix="remove the stale shard")
            tensors[tensor.name] = tensor
    return tensors


def _check_index(
    folder: Path, weight_map: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> None:
    for name in sorted(weight_map.keys() | tensors.keys()):
        if name not in tensors:
            raise _bad_index(folder, f"{name} stands in no shard")
        named, file = weight_map.get(name), tensors[name].file
        if named != file:
            raise _bad_index(folder, f"{name}: expected in {named!r}, found in {file!r}")


PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of files that torch.save writes."""
_CACHED = re.compile(r"models--(.+?)--(.+)")
"""How huggingface_hub names the folder of owner/name."""
_GGUF = "GGUF of llama.cpp, which holds other tensors than the draft that it was made from"
_SAFETENSORS = "give the folder of safetensors that it was converted from"


def mistaken_file(path: Path) -> tuple[str, str]:
    """What is wrong with a file instead of a draft folder, and the fix."""
    if path.suffix == ".gguf":
        return f"is {_GGUF}", _SAFETENSORS
    if path.suffix in PICKLES:
        return "is a file, not a draft folder", as_safetensors(path.parent)
    if path.suffix == ".safetensors" or path.name == CONFIG_FILE:
        return "is a file, not a draft folder", f"give a draft folder: {path.parent}"
    return "is a file, not a draft folder", "give a draft folder or a Hub id (owner/name)"


def pickles_in(folder: Path) -> list[str]:
    """Files that torch.save may have written, by name."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)


def as_safetensors(folder: Path) -> str:
    """What turns a folder of pickles into safetensors, with the command for a shell."""
    command = f"draftquant unpickle {shlex.quote(str(folder))} --out SAFETENSORS"
    return f"convert the draft to safetensors, because pickled weights are not read ({command})"


def near_folder(path: Path) -> Path | None:
    """A folder with nearly the same name beside one that does not exist."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    names = sorted(entry.name for entry in beside if entry.is_dir())
    close = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / close[0] if close else None


def without_safetensors(folder: Path) -> tuple[str, str]:
    """What a folder with a config.json holds instead of safetensors, and the fix."""
    if any(folder.glob("*.gguf")):
        return f"holds {_GGUF}", _SAFETENSORS
    if pickles := pickles_in(folder):
        return f"no safetensors file (found {pickles[0]})", as_safetensors(folder)
    return "no safetensors file", "download the weights too (*.safetensors), not config.json alone"


def mistaken_folder(folder: Path) -> tuple[str, str] | None:
    """What a folder without config.json is instead, and the fix; None = nothing known."""
    if (folder / "params.json").exists():
        what = "is in Mistral's own form (params.json), which is not supported, EAGLE or not"
        return what, "serve it with vLLM as it is, or give a draft with a config.json of its own"
    if (folder / "adapter_config.json").exists():
        merged = "merge it into the model that it adapts (peft: merge_and_unload)"
        return "is an adapter (LoRA), not a draft", f"{merged}, and give that folder"
    if (cached := _CACHED.fullmatch(folder.name)) and (folder / "snapshots").is_dir():
        hub_id = f"{cached[1]}/{cached[2]}"
        snapshots = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
        fix = f"give {hub_id}" + (f", or {snapshots[-1]}" if snapshots else "")
        return "is a folder of the Hub's cache, whose files lie below snapshots", fix
    if any(folder.glob("*.gguf")):
        return f"holds {_GGUF}", _SAFETENSORS
    if (folder / "trace.json").exists():
        fix = "give the draft first, and this folder behind --traces"
        return "is a trace folder, not a draft", fix
    if any(folder.glob("*.safetensors")):
        return None
    if pickles := pickles_in(folder):
        fix = f"put the draft's {CONFIG_FILE} beside it, then {as_safetensors(folder)}"
        return f"has no {CONFIG_FILE}, and no safetensors file (found {pickles[0]})", fix
    if below := sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}")):
        what = f"has no {CONFIG_FILE}, but {len(below)} folder(s) in it have"
        return what, f"did you mean {below[0]}?"
    return None
