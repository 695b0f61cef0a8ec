"""`draftquant dequantize`: the weights of a quantized draft as plain ones, for any engine."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from ..api.dequantize import dequantize
from ..console import megabytes, print_json, print_table, stdout, table

if TYPE_CHECKING:
    from ..api.reports import DequantizeReport

VERB = dequantize


def run(options: argparse.Namespace) -> int:
    """Dequantize, and print what rounding lost."""
    report = dequantize.run(options.settings)
    if options.json:
        print_json(_mapping(report))
    else:
        print_dequantization(report)
    return 0


def print_dequantization(report: "DequantizeReport") -> None:
    """Print what rounding lost per linear, then what was written."""
    numbers = ("weights", "rounded", "largest relative difference")
    found = table(f"Dequantized: {report.scheme} to {report.dtype}", "linear", *numbers,
                  right=numbers)  # fmt: skip
    for linear in report.linears:
        largest = f"{linear.max_relative_difference:.6f}"
        found.row(linear.module, f"{linear.elements:,}", f"{linear.rounded:,}", largest)
    print_table(found)
    stdout().line(
        (str(report.out), "bold"),
        f": {len(report.linears)} linears dequantized, {report.rounded:,} of"
        f" {report.elements:,} weights rounded by up to {report.max_relative_difference:.6f},"
        f" {report.kept} tensors kept byte for byte,"
        f" {megabytes(report.bytes_before)} -> {megabytes(report.bytes_after)}, verified",
    )


def _mapping(report: "DequantizeReport") -> dict[str, Any]:
    return {
        **dataclasses.asdict(report),
        "out": str(report.out),
        "elements": report.elements,
        "rounded": report.rounded,
        "max_relative_difference": report.max_relative_difference,
    }
