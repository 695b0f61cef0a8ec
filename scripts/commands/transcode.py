"""`draftquant transcode`: the same quantized values in another layout or dtype, bit for bit."""

import argparse
import dataclasses

from ..api.transcode import transcode
from ..console import megabytes, print_json, stdout

VERB = transcode


def run(options: argparse.Namespace) -> int:
    """Transcode, and print what was written."""
    report = transcode.run(options.settings)
    if options.json:
        print_json(dataclasses.asdict(report) | {"out": str(report.out)})
    else:
        out = stdout()
        out.line(
            (str(report.out), "bold"),
            f": {report.linears} linears with the same quantized values and scales,"
            f" {report.kept} tensors kept"
            f" byte for byte, {megabytes(report.bytes_before)} -> {megabytes(report.bytes_after)},"
            " verified",
        )
        out.line(report.before)
        out.line(f"-> {report.after}")
    return 0
