"""`draftquant verify`: re-read a quantized draft and compare it with its source."""

import argparse
from contextlib import suppress
from pathlib import Path

from ...quantize.drafts import read_draft
from ...quantize.errors import CheckpointError
from ...quantize.files.hub import DraftSource, resolve_draft
from ...quantize.files.provenance import QuantizedProvenance, read_provenance
from ...quantize.verify.audit import looks_quantized
from ...quantize.verify.folder import VerifyReport, verify
from ..console import print_json, print_table, progress_bar, stdout, table
from .common import add_subtree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`verify O --against DRAFT [--foreign] [--target M]`."""
    parser.add_argument("output", metavar="QUANT", help="quantized draft folder or Hub id")
    parser.add_argument("--against", required=True, metavar="DRAFT", help="its BF16 source")
    add_subtree(parser)
    parser.add_argument(
        "--foreign",
        action="store_true",
        help="another tool made QUANT: no draftquant.json is expected, and codes and scales may"
        " have the roundings of such tools",
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="TARGET",
        help="target folder: compare its tables again with those that QUANT leaves to it",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    output, source = resolve_draft(options.output), resolve_draft(options.against, options.subtree)
    _check_sides(output, source)
    with progress_bar("read headers", None) as bar:

        def show(done: int, total: int) -> None:
            if not bar.measured:
                bar.phase("verify", total, "bytes")
            bar.set(done, total)

        report = verify(
            output.folder,
            source.folder,
            show,
            foreign=options.foreign,
            target=options.target,
            subtree=source.subtree,
        )
    if options.json:
        print_json(report.to_mapping())
    else:
        print_verification(report)
    return 0 if report.ok else 1


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


def print_verification(report: VerifyReport) -> None:
    """Print the linears with their errors, then the verdict or every fault."""
    out = stdout()
    # Bounds are for folders of other tools: what a recipe of this package gives is known exactly.
    bounded = any(linear.max_error is not None for linear in report.linears)
    numbers = (*(("error / allowed",) if bounded else ()), "relative L2 error")
    found = table(
        f"Verified: {report.output} against {report.source}, declared"
        f" {report.scheme or 'as not quantized'}",
        "linear",
        *numbers,
        right=numbers,
    )
    for linear in report.linears:
        error = [f"{linear.max_error:.4f}"] if linear.max_error is not None else []
        found.row(linear.module, *error, f"{linear.relative_l2_error:.4f}")
    print_table(found)
    if report.retuned:
        out.line(
            ("RETUNED", "bold magenta"),
            ": its target taught it, so that the source does not say what its linears must be. That"
            " training gave these is not shown: only that they are those whose sha256"
            " draftquant.json records under its seal",
        )
    if report.dropped:
        names = ", ".join(report.dropped)
        shown = (
            "compared with the target's again, byte for byte"
            if report.dropped_shown
            else "recorded as equal to the target's, not compared again (--target TARGET)"
        )
        out.line(f"{names}: dropped, {shown}")
    if report.ok:
        out.line(
            ("GOOD", "bold green"),
            f": {report.kept} tensors equal byte for byte,"
            f" {report.quantized} linears as demanded ({report.rule}),"
            f" {report.bytes_compared:,} bytes compared",
        )
        return
    out.line(("WRONG", "bold red"), f": {len(report.faults)} fault(s)")
    for fault in report.faults:
        out.line(f"  {fault}")
