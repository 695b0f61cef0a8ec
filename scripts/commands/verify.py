"""`draftquant verify`: re-read a quantized draft and compare it with its source."""

import argparse
from pathlib import Path

from ...quantize.verify.folder import VerifyReport
from ..api.verify import verify
from ..console import OnTerminal, print_json, print_table, stdout, table
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
    report = verify(
        options.output,
        options.against,
        subtree=options.subtree,
        foreign=options.foreign,
        target=options.target,
        watch=OnTerminal(),
    )
    if options.json:
        print_json(report.to_mapping())
    else:
        print_verification(report)
    return 0 if report.ok else 1


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
        error = "-" if linear.max_error is None else f"{linear.max_error:.4f}"
        errors = (error,) if bounded else ()
        found.row(linear.module, *errors, f"{linear.relative_l2_error:.4f}")
    print_table(found)
    rules = [linear.found for linear in report.linears if linear.found]
    for rule in dict.fromkeys(rules):
        out.line(f"{rule}: {rules.count(rule)} linear(s)")
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
