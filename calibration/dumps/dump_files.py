"""The files of a dump: which ones, in which order, and what tensors they hold; hostile input."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...quantize.errors import CheckpointError
from ...quantize.files.safetensors_header import read_header
from ...quantize.files.torch_file import TorchFileProblem, load_plain
from ...recipes.errors import short, visible
from ..errors import TraceError
from .sample import AGAIN, Pending, Sample, make_sample

MAX_NAME = 150  # characters; the number of a turn may follow
_NUMBER = re.compile(r"(\d+)")


def find_files(dump: Path, suffixes: tuple[str, ...], *, written_by: str) -> list[Path]:
    """The files of a dump, anywhere below its folder, numbers in their names counted as numbers.

    Args:
        dump: the folder, or one of its files.

    Raises:
        TraceError: there are none.
    """
    found = [dump] if dump.is_file() else [p for p in dump.rglob("*") if p.name.endswith(suffixes)]
    if not found:
        what = "no such folder" if not dump.is_dir() else f"holds no file *{' or *'.join(suffixes)}"
        raise TraceError(dump, what, fix=f"give the folder that {written_by} wrote")
    return sorted(found, key=_natural)


def pending(files: Iterable[Path], load: Callable[[Path], Sample]) -> tuple[Pending, ...]:
    """The samples of these files, one each, unread."""

    def later(file: Path) -> Pending:
        return Pending(file, lambda: load(file))

    return tuple(map(later, files))


def sample_name(file: Path, dump: Path) -> str:
    """What the file is called within its dump, without its suffixes: rows_0-2000/data_3."""
    inside = file.relative_to(dump) if file != dump else Path(file.name)
    return visible(str(inside.with_name(inside.name.split(".")[0])))[-MAX_NAME:]


def stored_sample(
    file: Path,
    dump: Path,
    loaded: Mapping[str, Any],
    *,
    aux: str,
    last: str,
    masked: bool = True,
) -> Sample:
    """The text of a file that holds input_ids, loss_mask and these states.

    Args:
        file: where `loaded` comes from.
        dump: the folder that it lies in, or itself.
        last: that with the last states; it may be absent.
        masked: a loss_mask must be there.

    Raises:
        TraceError: an entry is absent, or something else than a tensor of the right shape.
    """
    names = ("input_ids", *(("loss_mask",) if masked else ()), aux)
    token_ids, *_, states = tensors(file, loaded, *names)
    return make_sample(
        file,
        sample_name(file, dump),
        token_ids=token_ids,
        answered=optional_tensor(file, loaded, "loss_mask"),
        aux=states,
        last=optional_tensor(file, loaded, last),
    )


def load_tensors(file: Path) -> Mapping[str, Any]:
    """The dict that torch.save wrote to a file, without running any code of it.

    Raises:
        TraceError: it is cut off, holds objects, or is no dict.
    """
    try:
        loaded = load_plain(file)
    except TorchFileProblem as exc:
        raise TraceError(
            file,
            f"cannot be read as plain tensors: {exc}",
            fix="remove the file if a run was stopped while writing it; else dump tensors,"
            " numbers and text only",
        ) from exc
    if not isinstance(loaded, dict):
        raise TraceError(
            file, f"expected a dict of tensors, got {type(loaded).__name__}", fix=AGAIN
        )
    return loaded


def load_safetensors(
    file: Path, names: Iterable[str], *, beside: Iterable[str] = ()
) -> dict[str, Tensor]:
    """These tensors of a safetensors file, and those `beside` them that it has.

    Raises:
        TraceError: the file is cut off, or lacks one of them.
    """
    try:
        found = {tensor.name for tensor in read_header(file.parent, file.name).tensors}
        _demand(file, names, found)
        with safe_open(file, framework="pt") as opened:
            wanted = [*names, *(name for name in beside if name in found)]
            return {name: opened.get_tensor(name) for name in wanted}
    except (CheckpointError, SafetensorError) as exc:
        what = exc.what if isinstance(exc, CheckpointError) else str(exc)
        raise TraceError(
            file,
            what,
            fix="remove the file if a run was stopped while writing it, or dump this text again",
        ) from exc


def tensors(file: Path, loaded: Mapping[str, Any], *names: str) -> tuple[Tensor, ...]:
    """Entries that must be plain tensors.

    Raises:
        TraceError: one is absent, or something else.
    """
    _demand(file, names, loaded)
    for name in names:
        if not _is_plain(loaded[name]):
            kind = type(loaded[name]).__name__
            raise TraceError(file, f"{name}: expected a dense tensor, got {kind}", fix=AGAIN)
    return tuple(loaded[name] for name in names)


def optional_tensor(file: Path, loaded: Mapping[str, Any], name: str) -> Tensor | None:
    """An entry that may be absent or None."""
    return None if loaded.get(name) is None else tensors(file, loaded, name)[0]


def _demand(file: Path, names: Iterable[str], found: Iterable[str]) -> None:
    absent = [name for name in names if name not in found]
    if absent:
        raise TraceError(
            file,
            f"holds no {', '.join(absent)}, but {short(sorted(map(str, found)))}",
            fix=AGAIN,
        )


def _is_plain(value: object) -> bool:
    """True for a dense tensor in memory that every operation of torch takes."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_nested
        and not value.is_quantized
    )


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(str(path))]
