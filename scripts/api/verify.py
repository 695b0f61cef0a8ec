"""`verify`: re-read a quantized draft and compare it with its source."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.hub import resolve_draft
from .opening import Reference, folder_of, optional_path
from .watch import SILENT, Watch

if TYPE_CHECKING:
    from ...quantize.verify.folder import VerifyReport


def verify(
    output: Reference,
    against: Reference,
    *,
    subtree: str | None = None,
    foreign: bool = False,
    target: str | Path | None = None,
    watch: Watch = SILENT,
) -> "VerifyReport":
    """Check every byte of a quantized folder against the draft that it was made from.

    Example:
        >>> report = draftquant.verify("OUT", against="DRAFT")
        >>> report.ok, report.faults
        (True, ())

    Args:
        output: folder or Hub id of the quantized draft.
        against: folder or Hub id of its BF16 source.
        subtree: prefix of the MTP layer that is the source, in the folder of its target.
        foreign: another tool made `output`: no draftquant.json is expected, and codes and scales
            may have the roundings of such tools.
        target: folder of the target: its tables are compared again with those left to it.
        watch: sees how far the run is.

    Returns:
        What was found, faults too: a wrong byte is no exception.

    Raises:
        CheckpointError: the source is not an unquantized draft; the output is no checkpoint at all.
    """
    from ...quantize.verify import folder

    source = resolve_draft(str(against), subtree)
    with watch.bar("read headers", None) as bar:

        def show(done: int, total: int) -> None:
            if not bar.measured:
                bar.phase("verify", total, "bytes")
            bar.set(done, total)

        return folder.verify(
            folder_of(output),
            source.folder,
            show,
            foreign=foreign,
            target=optional_path(target),
            subtree=source.subtree,
        )
