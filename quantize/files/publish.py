"""`publish`: the one way in which an output folder appears: whole and verified, or not at all."""

import errno
import json
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

from ...recipes.decode import encode
from ...recipes.errors import CheckpointError, OutputError
from ...recipes.regular_file import looks_like_weights
from .checkpoint import CONFIG_FILE, INDEX_FILE, PROVENANCE_FILE, UNVERIFIED, Checkpoint
from .provenance import Provenance
from .provenance_file import sealed
from .safetensors_file import copy_range
from .staging import check_output, staged_output, write_text

# A disk is slower than its cache: syncing at the end takes long, unless it begins early.

_PAUSE = 0.1  # seconds; the first files of a small folder are synced once


class Flushing:
    """A context whose thread syncs the files of a folder, each held open: no disk error is lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[Path, int] = {}
        self._all_written = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._runs: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._runs.append(self._pool.submit(self._begin))
        return self

    def __exit__(self, *exception: object) -> None:
        self._all_written.set()
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def finish(self) -> None:
        """Everything is written: sync it, while this thread goes on."""
        self._all_written.set()
        self._runs.append(self._pool.submit(self._sync, os.fsync))

    def wait(self) -> None:
        """Wait until everything is on the disk; an OSError if syncing failed."""
        for run in self._runs:
            run.result()

    def _begin(self) -> None:
        while not self._all_written.wait(_PAUSE):
            self._sync(os.fdatasync)

    def _sync(self, sync: Callable[[int], None]) -> None:
        for path in sorted(self._folder.rglob("*")):
            if path.is_file() and path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
        for descriptor in self._descriptors.values():
            sync(descriptor)


def check_no_other_weights(folder: Path, files: Sequence[str], *, travel: str, made: str) -> None:
    """Refuse side files with weights or pickles: a second copy of the draft, or an optimizer."""
    for file in files:
        if looks_like_weights(file):
            what = f"weights in another format would travel {travel}"
            fix = f"move this file out of the folder: the safetensors are what is {made}"
            raise CheckpointError(folder / file, what, fix=fix)


def copy_side_files(folder: Path, staging: Path, files: Sequence[str]) -> None:
    """Copy side files byte for byte; `publish` syncs them with everything else."""
    for file in files:
        (staging / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / file, staging / file)


def json_texts(documents: Mapping[str, Any]) -> dict[str, str]:
    """File -> its text, for documents that are written as JSON."""
    return {file: json.dumps(content, indent=2) + "\n" for file, content in documents.items()}


def config_and_index(
    source: Checkpoint, config: Mapping[str, Any], files: Mapping[str, str], nbytes: int
) -> dict[str, str]:
    """The text of config.json, and of the index where the source has one."""
    texts: dict[str, str] = {}
    if source.index is not None:
        metadata = {**source.index.get("metadata", {}), "total_size": nbytes}
        index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
        texts |= json_texts({INDEX_FILE: index})
    texts[CONFIG_FILE] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return texts


SPARE_BYTES = 16 << 20  # headers, config, provenance

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite(ABC, Generic[Found]):
    """A folder made from another one; config.json is `UNVERIFIED_CONFIG_FILE` until verified."""

    out: Path
    folder: Path
    tensor_bytes: int
    side_files: Sequence[str]
    documents: Mapping[str, str]

    @abstractmethod
    def write_tensors(self, staging: Path) -> None:
        """Write the safetensors files, which `publish` syncs to the disk."""

    @abstractmethod
    def verify(self, staging: Path) -> Found:
        """Re-read what was written, and raise if it is wrong."""

    def provenance(self, verification: Found) -> Provenance | None:  # noqa: ARG002
        """draftquant.json from what verification found, if any: no time stamp and no path."""
        return None

    def confirm(self, staging: Path, verification: Found) -> Found:  # noqa: ARG002
        """What verification found, completed with what it needs draftquant.json for."""
        return verification


def publish(
    rewrite: Rewrite[Found], on_stage: Callable[[str], None] = lambda _stage: None
) -> Found:
    """Check the output, write into a staging folder, re-read what was written, rename."""
    out, folder = rewrite.out, rewrite.folder
    side_bytes = sum((folder / file).stat().st_size for file in rewrite.side_files)
    check_output(out, folder, needed_bytes=rewrite.tensor_bytes + side_bytes + SPARE_BYTES)
    written: _States = {}

    def check(staging: Path) -> None:
        _check_untouched(out, _named(written), _named(_states(staging)))

    with staged_output(out, last=CONFIG_FILE, check=check) as staging, Flushing(staging) as disk:
        on_stage("write")
        rewrite.write_tensors(staging)
        copy_side_files(folder, staging, rewrite.side_files)
        for file, text in rewrite.documents.items():
            name = f"{file}{UNVERIFIED}" if file == CONFIG_FILE else file
            write_text(staging / name, text)
        on_stage("verify")
        disk.finish()
        written |= _states(staging)
        verification = rewrite.verify(staging)
        recorded = rewrite.provenance(verification)
        if recorded is not None:
            write_provenance(staging, recorded)
            written[PROVENANCE_FILE] = _state(staging / PROVENANCE_FILE)
        verification = rewrite.confirm(staging, verification)
        on_stage("sync")
        disk.wait()
        _check_untouched(out, written, _states(staging))
    return verification


class _State(NamedTuple):
    """What changes when something writes a file, or replaces it by another one."""

    nbytes: int
    modified_ns: int
    inode: int
    changed_ns: int
    """When modified_ns was set, too: a writer can restore that, but not this.

    0 for a file with several names (a linked one, of a target), which another name changes.
    """


def _state(path: Path) -> _State:
    status = path.lstat()
    changed = status.st_ctime_ns if status.st_nlink == 1 else 0
    return _State(status.st_size, status.st_mtime_ns, status.st_ino, changed)


_States = dict[str, _State | None]
"""State of every file below a folder, links included; folders, which have no bytes, are None."""


def _states(folder: Path) -> _States:
    states = {}
    for path in folder.rglob("*"):
        is_folder = path.is_dir() and not path.is_symlink()
        states[path.relative_to(folder).as_posix()] = None if is_folder else _state(path)
    return states


def _named(states: _States) -> _States:
    """The same after config.json was renamed, which changes its time of change."""
    named = {file.removesuffix(UNVERIFIED): state for file, state in states.items()}
    config = named.get(CONFIG_FILE)
    return named | {CONFIG_FILE: config and config._replace(changed_ns=0)}


def _check_untouched(out: Path, before: _States, after: _States) -> None:
    """What will be published is what was verified: nobody wrote into the folder since."""
    absent = object()
    for file in sorted(before.keys() | after.keys()):
        if before.get(file, absent) != after.get(file, absent):
            what = f"{file} appeared, changed or vanished while the folder was verified"
            fix = "stop other programs that write there, and run again; nothing was kept"
            raise OutputError(out, what, fix=fix)


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Write draftquant.json, sealed, to the disk: equal provenance gives equal bytes."""
    text = json.dumps(encode(sealed(provenance)), indent=2) + "\n"
    write_text(folder / PROVENANCE_FILE, text)


LinkChoice = Literal["hard", "symbolic", "none"]
LinkedAs = Literal["hard link", "symbolic link", "copy"]
_NO_HARD_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES}
"""Another disk, a file system without hard links, too many of one file, another user's file."""


def hard_links_work(file: Path, folder: Path, probe: str) -> bool:
    """Whether this file can be hard-linked into a folder; tries it."""
    trial = folder / probe
    try:
        os.link(file.resolve(), trial)
    except OSError as exc:
        if exc.errno in _NO_HARD_LINK:
            return False
        raise
    trial.unlink()
    return True


def place(file: Path, into: Path, how: LinkChoice) -> LinkedAs:
    """Give a file (not a link to it) a second name, or copy it where hard links fail."""
    itself = file.resolve()
    if how == "symbolic":
        into.symlink_to(itself)
        return "symbolic link"
    if how == "hard":
        try:
            os.link(itself, into)
        except OSError as exc:
            if exc.errno not in _NO_HARD_LINK:
                raise
        else:
            return "hard link"
    _copy(itself, into)
    return "copy"


def _copy(file: Path, into: Path) -> None:
    """Copy byte for byte, inside the kernel if possible: some file systems then share blocks."""
    with file.open("rb") as source, into.open("xb") as target:
        size = os.fstat(source.fileno()).st_size
        if copy_range(source.fileno(), target.fileno(), size, 0, 0) < size:
            raise OSError(errno.EIO, "the file became shorter while it was copied", str(file))
