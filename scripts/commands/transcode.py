"""`draftquant transcode`: the same codes and scales in another layout or carrier, bit for bit."""

import argparse
import dataclasses
import typing
from pathlib import Path

from ...quantize.files.hub import resolve_draft
from ...recipes.schema import LayoutName
from ..console import megabytes, print_json, progress_bar, stdout
from .common import begin_verifying


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`transcode O --layout L [--carrier fp8_e4m3|none] --out C`."""
    parser.add_argument("quantized", metavar="QUANT", help="quantized draft folder or Hub id")
    parser.add_argument(
        "--layout",
        choices=typing.get_args(LayoutName),
        help="of the output; default: that of QUANT",
    )
    parser.add_argument(
        "--carrier",
        choices=("fp8_e4m3", "none"),
        help="store INT4 codes per channel as FP8 ones, which every engine loads, or back as INT4;"
        " default: as in QUANT",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder to create"
    )
    parser.add_argument(
        "--target-layers",
        type=int,
        metavar="LAYERS",
        help="decoder layers of the target, for layouts whose excludes are whole names (fp8)",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...quantize.transcoding.transcode import plan_transcoding, transcode_draft

    plan = plan_transcoding(
        resolve_draft(options.quantized),
        options.layout,
        options.carrier,
        target_layers=options.target_layers,
    )
    with progress_bar("transcode", plan.bytes_after, "bytes") as bar:
        report = transcode_draft(
            plan,
            options.out,
            argv=options.argv,
            on_progress=bar.advance,
            on_stage=begin_verifying(bar),
        )
    if options.json:
        print_json(dataclasses.asdict(report) | {"out": str(report.out)})
    else:
        out = stdout()
        out.line(
            (str(report.out), "bold"),
            f": {report.linears} linears with the same codes and scales, {report.kept} tensors kept"
            f" byte for byte, {megabytes(report.bytes_before)} -> {megabytes(report.bytes_after)},"
            " verified",
        )
        out.line(report.before)
        out.line(f"-> {report.after}")
    return 0
