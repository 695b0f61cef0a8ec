"""Unpickling a draft: what torch.save wrote as one safetensors file, so that everything reads it.

The pickles are read as hostile input (`files/torch_file`): plain tensors only, and no code runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .checkpoint import CONFIG_FILE, HIDDEN, read_json_object
from .entries import (
    MASK_EMBEDDING_FILE,
    SIGNATURE_FILE,
    check_own,
    files_of,
    looks_like_weights,
)
from .safetensors_file import SafetensorsFile
from .safetensors_header import StoredTensor
from .side_files import copy_side_files
from .staging import UNVERIFIED, check_output, staged_output
from .torch_file import TorchFileProblem, load_plain

WEIGHTS_FILE = "model.safetensors"
_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpickled:
    """What was written.

    Attributes:
        out: the folder. files: the pickles that were read, in order. tensors: their number.
        nbytes: of the tensors.
    """

    out: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int


def pickles(folder: Path) -> tuple[str, ...]:
    """The pickled weights of a folder, by name; the mask embedding is none of them.

    Raises:
        CheckpointError: one of them is a link out of the folder, or no file at all.
    """
    return tuple(files_of(folder, skip=lambda file: not _is_pickle(file)))


def unpickle_draft(folder: Path, out: Path) -> Unpickled:
    """Write a folder with the tensors of all pickles, value for value, and the files beside them.

    Args:
        folder: config.json and pickled weights, one file or shards.
        out: folder to create.

    Raises:
        CheckpointError: there are no pickles, safetensors lie beside them, one holds anything but
            tensors by name, or two hold the same name.
        OutputError: `out` exists, or cannot be written.
    """
    if not folder.is_dir():
        raise CheckpointError(folder, "no such folder", fix="give the folder of a draft")
    check_own(folder, CONFIG_FILE)
    read_json_object(folder / CONFIG_FILE, "every draft needs its config.json")
    files = pickles(folder)
    if not files or any(folder.glob("*.safetensors")):
        what = "safetensors are there already" if files else "no pickled weights are here"
        fix = f"give a folder with {', '.join(_SUFFIXES)} only"
        if any(folder.glob("*.safetensors")):
            fix = "safetensors need no conversion: give this folder to the other commands"
        raise CheckpointError(folder, what, fix=fix)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _tensors(folder / file).items():
            if name in tensors:
                raise CheckpointError(
                    folder / file,
                    f"{name} also stands in another of the files",
                    fix="move weights that are not the draft's out of the folder",
                )
            tensors[name] = tensor
    stored = [
        StoredTensor(name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    nbytes = sum(tensor.nbytes for tensor in stored)
    check_output(out, folder, needed_bytes=nbytes)
    beside = _side_files(folder)
    with staged_output(out, last=CONFIG_FILE) as staging:
        with SafetensorsFile(staging / WEIGHTS_FILE, stored, {"format": "pt"}) as file_:
            for name, tensor in tensors.items():
                file_.write(name, tensor)
        copy_side_files(folder, staging, beside)
        (staging / CONFIG_FILE).rename(staging / f"{CONFIG_FILE}{UNVERIFIED}")
    return Unpickled(out=out, files=files, tensors=len(stored), nbytes=nbytes)


def _is_pickle(file: str) -> bool:
    at_top = "/" not in file and file.endswith(_SUFFIXES)
    return at_top and file != MASK_EMBEDDING_FILE


def _side_files(folder: Path) -> list[str]:
    """Files of the folder that hold no weights, and the mask embedding."""

    def stays(file: str) -> bool:
        hidden = Path(file).parts[0] in HIDDEN
        return hidden or file == SIGNATURE_FILE or looks_like_weights(file)

    return files_of(folder, skip=stays)


def _tensors(path: Path) -> Mapping[str, Tensor]:
    try:
        loaded: Any = load_plain(path)
    except TorchFileProblem as exc:
        raise CheckpointError(
            path, f"not readable as tensors of torch.save: {exc}", fix="download the file again"
        ) from exc
    if not isinstance(loaded, dict) or not loaded:
        raise CheckpointError(
            path,
            f"expected tensors by name, got {type(loaded).__name__}",
            fix="save the draft's state_dict() itself",
        )
    for name, tensor in loaded.items():
        named = isinstance(name, str) and isinstance(tensor, Tensor)
        if not named or tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(
                path,
                f"{name!r}: expected a tensor of {', '.join(_DTYPES.values())}, got {got}",
                fix="save the draft's state_dict() itself, unquantized",
            )
    return loaded
