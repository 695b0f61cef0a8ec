"""`publish`: the one way in which an output folder comes to be. Whole and verified, or not at all.

It knows files and their order, not what stands in them: that is the business of those who quantize,
dequantize and repair.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ..errors import VerifyError
from .checkpoint import Checkpoint
from .provenance import Provenance, write_provenance
from .side_files import copy_side_files
from .staging import check_output, staged_output, write_text

SPARE_BYTES = 16 << 20  # headers, config, provenance

Verified = TypeVar("Verified")


def publish(
    out: Path,
    source: Checkpoint,
    *,
    tensor_bytes: int,
    write_tensors: Callable[[Path], None],
    side_files: Sequence[str],
    documents: Mapping[str, str],
    verify: Callable[[Path], Verified],
    provenance: Callable[[Verified], Provenance | None],
    confirm: Callable[[Path], None] = lambda _staging: None,
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> Verified:
    """Check the output, write into a staging folder, re-read what was written, rename.

    Args:
        out: folder to create.
        source: the folder that is read.
        tensor_bytes: of the safetensors files that will be written.
        write_tensors: writes and syncs them into the folder that it is given.
        side_files: files of the source that travel byte for byte.
        documents: text of the other files by name, written in this order; config.json is the last,
            so that a killed run leaves nothing that looks like a checkpoint.
        verify: re-reads the folder that it is given, and raises if it is not as it should be.
        provenance: draftquant.json from what verification found, None for none.
        confirm: as `verify`, with draftquant.json in its place.
        on_stage: called with "write" and "verify" when they begin.

    Returns:
        What `verify` found.

    Raises:
        OutputError: `out` exists, overlaps the source, or cannot be written.
        DraftQuantError: whatever the steps raise; nothing is left behind.
    """
    side_bytes = sum((source.folder / file).stat().st_size for file in side_files)
    check_output(out, source.folder, needed_bytes=tensor_bytes + side_bytes + SPARE_BYTES)
    with staged_output(out) as staging:
        on_stage("write")
        write_tensors(staging)
        copy_side_files(source.folder, staging, side_files)
        for file, text in documents.items():
            write_text(staging / file, text)
        on_stage("verify")
        verified = verify(staging)
        recorded = provenance(verified)
        if recorded is not None:
            write_provenance(staging, recorded)
        confirm(staging)
    return verified


def check_faults(out: Path, faults: Sequence[object], *, fix: str) -> None:
    """What verification finds fault with is not published.

    Raises:
        VerifyError: names the first ten faults.
    """
    if faults:
        raise VerifyError(
            out,
            "the written folder does not pass verification, and is not published:",
            details=[f"  {fault}" for fault in faults[:10]],
            fix=fix,
        )
