"""`draftquant gate`: judge a quantized draft against its BF16 source on the same traces."""

import argparse
import json
import math
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.hub import resolve_draft
from ...quantize.files.provenance import read_provenance
from ...quantize.files.staging import check_output, write_text
from ...recipes.schema import PolicyName
from ..console import print_json, print_table, stdout, table
from .common import add_replay_arguments
from .replay import print_replays, replay_with_progress

if TYPE_CHECKING:
    from ...validate.gate import GateReport

COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "ANOMALOUS": "magenta"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`gate BF16 QUANT --traces T --policy P`."""
    parser.add_argument("baseline", metavar="BF16", help="the draft as released")
    parser.add_argument("candidate", metavar="QUANT", help="the quantized draft")
    add_replay_arguments(parser)
    parser.add_argument(
        "--policy",
        choices=typing.get_args(PolicyName),
        help="default: that of QUANT's recipe, else release",
    )
    parser.add_argument(
        "--max-relative-drop",
        type=float,
        metavar="X",
        help="margin instead of the policy's, 1 %% = 0.01",
    )
    parser.add_argument("--confidence", type=float, metavar="C", help="instead of the policy's")
    parser.add_argument("--min-prompts", type=int, metavar="N", help="instead of the policy's")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="also write the JSON report here"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...calibration.traces import TraceFolder
    from ...validate.candidate import check_held_out, policy_of
    from ...validate.gate import judge
    from ...validate.policy import resolve_policy

    candidate = read_provenance(resolve_draft(options.candidate).folder)
    policy = resolve_policy(
        options.policy or policy_of(candidate),
        max_relative_drop=options.max_relative_drop,
        confidence=options.confidence,
        min_prompts=options.min_prompts,
    )
    if options.report:
        check_output(options.report)
    check_held_out(candidate, TraceFolder.open(options.traces).sha256)
    options.drafts = [options.baseline, options.candidate]
    replays = replay_with_progress(options)
    report = judge(replays[0], replays[1], policy)
    if options.report:
        write_text(options.report, json.dumps(report.to_mapping(), indent=2) + "\n")
    if options.json:
        print_json(report.to_mapping())
    else:
        print_replays(replays)
        print_gate(report)
    return report.exit_code


def print_gate(report: "GateReport") -> None:
    """Print the statistic and the verdict."""
    out = stdout()
    if report.change is not None:
        found = table("Gate", "policy", "limit", "change", "lower bound", "upper bound", "prompts")
        found.row(
            report.policy.name,
            f"{-report.policy.max_relative_drop:+.2%}",
            f"{report.change.relative_change:+.2%}",
            f"{math.expm1(report.change.lower):+.2%}",
            f"{math.expm1(report.change.upper):+.2%}",
            str(report.num_prompts),
        )
        print_table(found)
    colour = COLOURS[report.verdict]
    out.line((report.verdict, f"bold {colour}"), f": {report.reason}")
    if report.action:
        out.line(f"  {report.action}")
