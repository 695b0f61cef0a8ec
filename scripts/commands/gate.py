"""`draftquant gate`: judge a quantized draft against its BF16 source on the same traces."""

import argparse
import json
import math
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from ...quantize.files.hub import resolve_draft
from ...quantize.files.provenance import Provenance, QuantizedProvenance, read_provenance
from ...quantize.files.staging import check_output, write_text
from ...recipes.schema import PolicyName
from ...validate.looks import Spending, parse_look
from ..console import print_json, print_table, stdout, table
from .common import add_replay_arguments
from .replay import print_replays, replay_with_progress

if TYPE_CHECKING:
    from ...validate.gate import GateReport
    from ...validate.paired import PairedChange

COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "ANOMALOUS": "magenta"}
BOUNDS = ("change", "lower bound", "upper bound")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`gate BF16 QUANT --traces T --policy P`."""
    parser.add_argument("baseline", metavar="BF16", help="the draft as released")
    parser.add_argument("candidate", metavar="QUANT", help="the quantized draft")
    add_replay_arguments(parser)
    parser.add_argument(
        "--policy",
        choices=typing.get_args(PolicyName),
        default="release",
        help="default: release, whatever QUANT's recipe asks for",
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
        "--every-category-passes",
        action="store_true",
        help="PASS only if every category with enough prompts passes, not just if none fails",
    )
    parser.add_argument(
        "--look",
        metavar="I/N",
        help="this is look I of N planned ones at a growing set of prompts, equal additions each",
    )
    parser.add_argument(
        "--spending",
        choices=typing.get_args(Spending),
        help="how --look spends the error over the looks (default: obrien-fleming, most at the"
        " last)",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="also write the JSON report here"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...calibration.traces import TraceFolder
    from ...validate.candidate import check_held_out
    from ...validate.gate import judge
    from ...validate.policy import resolve_policy

    candidate = read_provenance(resolve_draft(options.candidate).folder)
    policy = resolve_policy(
        options.policy,
        max_relative_drop=options.max_relative_drop,
        confidence=options.confidence,
        min_prompts=options.min_prompts,
        every_category_passes=options.every_category_passes,
    )
    look = parse_look(options.look, options.spending)
    if options.report:
        check_output(options.report)
    check_held_out(candidate, TraceFolder.open(options.traces).sha256)
    options.drafts = [options.baseline, options.candidate]
    replays = replay_with_progress(options)
    warnings = other_policy_warnings(candidate, options.policy)
    report = judge(replays[0], replays[1], policy, look=look, warnings=warnings)
    if options.report:
        write_text(options.report, json.dumps(report.to_mapping(), indent=2) + "\n")
    if options.json:
        print_json(report.to_mapping())
    else:
        print_replays(replays)
        print_gate(report)
    return report.exit_code


def other_policy_warnings(candidate: Provenance | None, policy: PolicyName) -> list[str]:
    """A candidate does not choose its own judge, but what its recipe asks for is said."""
    if not isinstance(candidate, QuantizedProvenance) or candidate.recipe.gate.policy == policy:
        return []
    asked = candidate.recipe.gate.policy
    return [f"the candidate's recipe asks for the policy {asked!r}, in use is {policy!r}"]


def print_gate(report: "GateReport") -> None:
    """Print the statistic, the categories, the verdict and the warnings."""
    out = stdout()
    if report.change is not None:
        look = f", look {report.look.number} of {report.look.total}" if report.look else ""
        numbers = (*BOUNDS, "confidence", "prompts", "effective")
        found = table(f"Gate{look}", "policy", "limit", *numbers)
        found.add_row(
            report.policy.name,
            f"{-report.policy.max_relative_drop:+.2%}",
            *_bounds(report.change),
            f"{report.change.confidence:.2%}",
            str(report.num_prompts),
            f"{report.change.effective_num_prompts:.1f}",
        )
        print_table(found)
    if len(report.categories) > 1:
        _print_categories(report)
    colour = COLOURS[report.verdict]
    out.print(f"[bold {colour}]{report.verdict}[/]: {escape(report.reason)}")
    if report.action:
        out.print(f"  {escape(report.action)}")
    for warning in report.warnings:
        out.print(f"[yellow]warning:[/] {escape(warning)}")


def _print_categories(report: "GateReport") -> None:
    found = table("Categories", "category", "prompts", "limit", *BOUNDS, "outcome")
    for own in report.categories:
        found.add_row(
            escape(own.category),
            str(own.num_prompts),
            f"{-own.max_relative_drop:+.2%}",
            *(_bounds(own.change) if own.change else ("", "", "")),
            own.outcome or "too small",
        )
    print_table(found)


def _bounds(change: "PairedChange") -> tuple[str, str, str]:
    return (
        f"{change.relative_change:+.2%}",
        f"{math.expm1(change.lower):+.2%}",
        f"{math.expm1(change.upper):+.2%}",
    )
