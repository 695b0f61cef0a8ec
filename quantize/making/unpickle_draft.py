"""Unpickling a draft: the files of torch.save become one safetensors file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ...recipes.errors import CheckpointError, VerifyError
from ...recipes.regular_file import (
    MASK_EMBEDDING_FILE,
    SIGNATURE_FILE,
    check_own,
    files_of,
    looks_like_weights,
    read_text,
)
from ..files.checkpoint import (
    CONFIG_FILE,
    HIDDEN,
    no_config,
    open_weights,
    pread_exactly,
    read_json_object,
)
from ..files.publish import Rewrite, publish
from ..files.safetensors_file import SafetensorsFile
from ..files.safetensors_header import StoredTensor, read_header
from ..files.torch_file import TorchFileProblem, load_plain

WEIGHTS_FILE = "model.safetensors"
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32",
    torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL",
}  # fmt: skip
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Unpickled(Brief):
    """A draft whose pickled weights were written as safetensors.

    Attributes:
        out: the folder that was written.
        files: the pickles that were read, in order.
        tensors: number of tensors.
        nbytes: their bytes.
    """

    out: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "out": self.out,
            "files": ", ".join(self.files),
            "tensors": self.tensors,
            "size": megabytes(self.nbytes),
        }


def pickles(folder: Path) -> tuple[str, ...]:
    """The pickled weights of a folder, by name; the mask embedding does not count."""

    def is_none(file: str) -> bool:
        return "/" in file or not file.endswith(_SUFFIXES) or file == MASK_EMBEDDING_FILE

    return tuple(files_of(folder, skip=is_none))


def unpickle_draft(folder: Path, out: Path) -> Unpickled:
    """Write a folder with the tensors of all pickles, and copy the other files."""
    if not folder.is_dir():
        raise CheckpointError(folder, "no such folder", fix="give the folder of a draft")
    check_own(folder, CONFIG_FILE)
    read_json_object(folder / CONFIG_FILE, no_config(folder))
    config = read_text(folder / CONFIG_FILE)
    files = pickles(folder)
    if not files or any(folder.glob("*.safetensors")):
        what = "it already holds safetensors" if files else "it holds no pickled weights"
        fix = f"give a folder that holds only {', '.join(_SUFFIXES)}"
        if any(folder.glob("*.safetensors")):
            fix = "give this folder to the other commands: safetensors need no conversion"
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
    unpickling = _Unpickling(
        out=out,
        folder=folder,
        tensor_bytes=nbytes,
        side_files=_side_files(folder),
        documents={CONFIG_FILE: config},
        tensors=tensors,
        stored=stored,
    )
    publish(unpickling)
    return Unpickled(out=out, files=files, tensors=len(stored), nbytes=nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unpickling(Rewrite[None]):
    tensors: Mapping[str, Tensor]
    stored: Sequence[StoredTensor]

    @override
    def write_tensors(self, staging: Path) -> None:
        with SafetensorsFile(staging / WEIGHTS_FILE, self.stored, {"format": "pt"}) as file:
            for name, tensor in self.tensors.items():
                file.write(name, tensor)

    @override
    def verify(self, staging: Path) -> None:
        with open_weights(staging / WEIGHTS_FILE) as descriptor:
            for tensor in read_header(staging, WEIGHTS_FILE).tensors:
                written = bytearray(tensor.nbytes)
                pread_exactly(descriptor, memoryview(written), tensor.start, tensor.name)
                read = self.tensors[tensor.name].reshape(-1).view(torch.uint8)
                if written != read.numpy().tobytes():
                    raise VerifyError(
                        self.out,
                        f"{tensor.name} reads back differently than it was written, so nothing is"
                        " published",
                        fix="run again; if it stays, check the disk",
                    )


def _side_files(folder: Path) -> list[str]:
    def stays(file: str) -> bool:
        hidden = Path(file).parts[0] in HIDDEN
        return hidden or file in (CONFIG_FILE, SIGNATURE_FILE) or looks_like_weights(file)

    return files_of(folder, skip=stays)


def _tensors(path: Path) -> Mapping[str, Tensor]:
    try:
        loaded: Any = load_plain(path)
    except TorchFileProblem as exc:
        raise CheckpointError(
            path,
            f"not readable as tensors of torch.save: {exc}",
            fix="download the file again",
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
