"""`draftquant graft`: put an MTP layer that was quantized apart back into its target's folder."""

import argparse
import dataclasses
from collections import Counter

from ..api.graft import graft
from ..console import megabytes, print_json, stdout

VERB = graft


def run(options: argparse.Namespace) -> int:
    """Graft, and print what was written and what engines do with it."""
    report = graft.run(options.settings)
    if options.json:
        print_json(
            {
                **{
                    field.name: getattr(report, field.name)
                    for field in dataclasses.fields(report)
                    if field.name != "checks"
                },
                "out": str(report.out),
                "checks": [dataclasses.asdict(check) for check in report.checks],
            }
        )
        return 0
    out = stdout()
    out.line(
        (str(report.out), "bold"),
        f": {', '.join(report.layers)}, {report.scheme or 'not quantized'}, in the target:"
        f" {report.layer_tensors} tensors of the layer, {megabytes(report.bytes_written)} written;"
        f" all {report.target_tensors} tensors of the target unchanged, verified",
    )
    for way, count in Counter(report.linked.values()).items():
        out.line(f"{count} file(s) of the target: {way}")
    if report.rewritten:
        out.line(
            f"{len(report.rewritten)} file(s) written again without the {report.replaced} tensors"
            " that were replaced"
        )
    if report.left_out:
        out.line(f"left out, as they are the target's: {', '.join(report.left_out)}")
    for check in report.checks:
        out.line((f"{check.verdict}", "bold"), f": {check.title} on {check.gpu}")
        if check.error:
            out.line(f"  {check.error}")
    return 0
