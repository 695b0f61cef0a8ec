"""`publish`: the one way in which an output folder comes to be. Whole and verified, or not at all.

It knows files and their order, not what stands in them: that is the business of each `Rewrite`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from ...recipes.decode import encode
from ..errors import OutputError
from .checkpoint import CONFIG_FILE, PROVENANCE_FILE, UNVERIFIED
from .flushing import Flushing
from .provenance import Provenance
from .provenance_file import sealed
from .side_files import copy_side_files
from .staging import check_output, staged_output, write_text

SPARE_BYTES = 16 << 20  # headers, config, provenance

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite(ABC, Generic[Found]):
    """A folder that is made of another one: what is written, how it is verified and recorded.

    What can be known before anything is written is in the attributes.

    Attributes:
        out: folder to create.
        folder: the one that is read.
        tensor_bytes: of the safetensors files that will be written.
        side_files: files of `folder` that travel byte for byte.
        documents: text of the other files by name, written in this order; config.json among them
            is called `UNVERIFIED_CONFIG_FILE` until all is verified, so that a killed run leaves
            nothing that looks like a checkpoint.
    """

    out: Path
    folder: Path
    tensor_bytes: int
    side_files: Sequence[str]
    documents: Mapping[str, str]

    @abstractmethod
    def write_tensors(self, staging: Path) -> None:
        """Write the safetensors files, which `publish` brings to the disk."""

    @abstractmethod
    def verify(self, staging: Path) -> Found:
        """Re-read what was written, and raise if it is not as it should be."""

    def provenance(self, found: Found) -> Provenance | None:  # noqa: ARG002
        """draftquant.json from what verification found; without one of its own, None.

        No time stamp and no path, so that equal runs give equal files.
        """
        return None

    def confirm(self, staging: Path, found: Found) -> Found:  # noqa: ARG002
        """Verify what asks for draftquant.json, which is in its place by now.

        Returns:
            What verification found, with this.
        """
        return found


def publish(
    rewrite: Rewrite[Found], on_stage: Callable[[str], None] = lambda _stage: None
) -> Found:
    """Check the output, write into a staging folder, re-read what was written, rename.

    Args:
        on_stage: called with "write", "verify" and "sync" when they begin; the disk has worked
            since the first byte was written, and "sync" waits for the rest.

    Returns:
        What its verification found.

    Raises:
        OutputError: `out` exists, overlaps the source, cannot be written, or something else wrote
            into the staging folder after verification had begun.
        DraftQuantError: whatever the steps raise; nothing is left behind.
    """
    out, folder = rewrite.out, rewrite.folder
    side_bytes = sum((folder / file).stat().st_size for file in rewrite.side_files)
    check_output(out, folder, needed_bytes=rewrite.tensor_bytes + side_bytes + SPARE_BYTES)
    written: dict[str, _State | None] = {}

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
        found = rewrite.verify(staging)
        recorded = rewrite.provenance(found)
        if recorded is not None:
            write_provenance(staging, recorded)
            written[PROVENANCE_FILE] = _state(staging / PROVENANCE_FILE)
        found = rewrite.confirm(staging, found)
        on_stage("sync")
        disk.wait()
        _check_untouched(out, written, _states(staging))
    return found


class _State(NamedTuple):
    """What changes when something writes a file, or puts another one in its place."""

    nbytes: int
    modified_ns: int
    inode: int
    changed_ns: int
    """When modified_ns was set, too: whoever writes can put that back, but not this.

    0 of a file with several names (a linked one, of a target), which another name changes.
    """


def _state(path: Path) -> _State:
    status = path.lstat()
    changed = status.st_ctime_ns if status.st_nlink == 1 else 0
    return _State(status.st_size, status.st_mtime_ns, status.st_ino, changed)


def _states(folder: Path) -> dict[str, _State | None]:
    """Of every file below a folder, links as such; folders, which have no bytes, are None."""
    return {
        path.relative_to(folder).as_posix(): (
            None if path.is_dir() and not path.is_symlink() else _state(path)
        )
        for path in folder.rglob("*")
    }


def _named(states: Mapping[str, _State | None]) -> dict[str, _State | None]:
    """The same when config.json has got its name, by which its time of change is another one."""
    named = {file.removesuffix(UNVERIFIED): state for file, state in states.items()}
    config = named.get(CONFIG_FILE)
    return named | {CONFIG_FILE: config and config._replace(changed_ns=0)}


def _check_untouched(
    out: Path, before: Mapping[str, _State | None], after: Mapping[str, _State | None]
) -> None:
    """What will be published is what was verified: nobody wrote into the folder meanwhile."""
    absent = object()
    for file in sorted(before.keys() | after.keys()):
        if before.get(file, absent) != after.get(file, absent):
            raise OutputError(
                out,
                f"{file} appeared, changed or vanished while the folder was verified",
                fix="stop other programs that write there, and run again; nothing was kept",
            )


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Write draftquant.json, sealed, to the disk: equal provenance gives equal bytes."""
    text = json.dumps(encode(sealed(provenance)), indent=2) + "\n"
    write_text(folder / PROVENANCE_FILE, text)
