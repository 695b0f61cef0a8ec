"""`draftquant gate`: prints the verdict, and all that it rests on."""

import argparse

from ..api.gate import gate, judged
from ..console import print_json
from .gate_report import print_joint, print_judged
from .replay import print_replays

VERB = gate


def run(options: argparse.Namespace) -> int:
    """Judge, and print the verdict; its exit code."""
    from ...validate.served.joint_report import JointReport

    found = judged(options.settings)
    report = found.report
    if options.json:
        print_json(found.document)
        return report.exit_code
    if found.replays:
        print_replays(found.replays)
    if isinstance(report, JointReport):
        print_joint(report)
    else:
        print_judged(report)
    return report.exit_code
