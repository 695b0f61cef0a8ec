"""`draftquant dequantize`: the weights of a quantized draft as plain ones, for any engine."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quantize.files.hub import resolve_draft
from ..console import megabytes, print_json, print_table, progress_bar, stdout, table
from .common import add_subtree, begin_verifying

if TYPE_CHECKING:
    from ...quantize.dequantize import DequantizeReport
    from ...quantize.files.safetensors_header import FloatDtype

_DTYPES: "dict[str, FloatDtype]" = {"bfloat16": "BF16", "float32": "F32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`dequantize O --out B [--dtype bfloat16|float32]`."""
    parser.add_argument("quantized", metavar="QUANT", help="quantized draft folder or Hub id")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder to create"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(_DTYPES),
        help="of the dequantized weights, instead of that of the kept ones; float32 loses nothing",
    )
    add_subtree(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...quantize.dequantize import dequantize_draft, plan_dequantization

    source, dtype = resolve_draft(options.quantized, options.subtree), _DTYPES.get(options.dtype)
    plan = plan_dequantization(source.checkpoint(), dtype)
    with progress_bar("dequantize", plan.bytes_after, "bytes") as bar:
        report = dequantize_draft(
            source,
            options.out,
            dtype=dtype,
            argv=options.argv,
            on_progress=bar.advance,
            on_stage=begin_verifying(bar),
        )
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
