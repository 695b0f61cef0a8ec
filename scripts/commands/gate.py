"""`draftquant gate`: prints the verdict, and all that it rests on."""

import argparse
import shlex
from collections.abc import Mapping

from ..api.gate import GateSettings, gate, judged
from ..console import print_json
from .gate_report import print_gate, print_joint
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
    places = _places(options.settings)
    if isinstance(report, JointReport):
        print_joint(report, places)
    else:
        print_gate(report, places)
    return report.exit_code


def _places(settings: GateSettings) -> Mapping[str, str]:
    """What commands to copy call BF16 and so on -> what was given here."""
    given = {
        "BF16": settings.baseline,
        "QUANT": settings.candidate,
        "TRACES": settings.traces,
        "TARGET": settings.target,
    }
    return {name: shlex.quote(str(place)) for name, place in given.items() if place is not None}
