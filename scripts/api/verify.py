"""`verify`: re-read a quantized draft and compare it with its source."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.drafts import read_draft
from ...quantize.errors import CheckpointError
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.hub import DraftSource, resolve_draft
from ...quantize.files.provenance import QuantizedProvenance
from ...quantize.files.provenance_file import read_provenance
from ...quantize.stored.declarations import declared_scheme
from ...quantize.verify.audit import looks_quantized
from .opening import Reference, optional_path
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
        DeclarationError: another tool's folder declares what is not supported: that is no verdict.
    """
    from ...quantize.verify import folder

    source = resolve_draft(str(against), subtree)
    quantized = resolve_draft(str(output))
    _check_sides(quantized, source)
    if foreign:
        _check_declaration(quantized)
    with watch.bar("read headers", None) as bar:

        def show(done: int, total: int) -> None:
            if not bar.measured:
                bar.phase("verify", total, "bytes")
            bar.set(done, total)

        return folder.verify(
            quantized.folder,
            source.folder,
            show,
            foreign=foreign,
            target=optional_path(target),
            subtree=source.subtree,
        )


def _check_declaration(output: DraftSource) -> None:
    """What another tool declares is understood; what else is wrong is a fault of the report.

    Raises:
        DeclarationError: it is not.
    """
    with suppress(CheckpointError):
        declared_scheme(Checkpoint.open(output.folder))


def _check_sides(output: DraftSource, source: DraftSource) -> None:
    """The two are not swapped, and the source is of the family that was quantized.

    Raises:
        CheckpointError: they are, or it is not.
    """
    given = source.checkpoint()
    if looks_quantized(given):
        raise CheckpointError(
            source.folder,
            "expected the unquantized draft behind --against, but it stores codes",
            fix=f"draftquant verify {source.folder} --against {output.folder}, if they are swapped",
        )
    record = None
    with suppress(CheckpointError):  # one that cannot be read is a fault of the folder
        record = read_provenance(output.folder)
    family = read_draft(given).family.name
    if isinstance(record, QuantizedProvenance) and record.source.family != family:
        raise CheckpointError(
            source.folder,
            f"is of family {family}: {output.folder} was made from one of {record.source.family}",
            fix="give the draft that it was made from behind --against",
        )
