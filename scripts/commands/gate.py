"""`draftquant gate`: judge a quantized draft against its BF16 source.

On the same traces, or by measurements of servers, or both: see `gate_measured`. A draft that its
target taught is judged against the BF16 draft taught alike too: see `retuned`.
"""

import argparse
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from ...recipes.expectations import PolicyName
from ...validate.judging.interim_analysis import Spending, parse_look
from ..api.gate import Judged, OnTraces, judge_on_traces
from ..console import OnTerminal, print_json
from .common import share
from .gate_measured import (
    add_measured_arguments,
    check_given,
    judge_joint,
    judged_drafts,
    print_joint,
    read_measured,
)
from .gate_report import print_judged
from .replay import print_replays
from .replaying import add_replay_arguments, settings_of
from .report_outputs import (
    add_page_arguments,
    asked_for,
    check_pages,
    wants_pages,
    write_pages,
)

if TYPE_CHECKING:
    from ...validate.judging.interim_analysis import Look
    from ...validate.judging.judgement import GateReport
    from ...validate.judging.policy import Policy
    from ...validate.judging.retuned_gate import RetunedReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`gate BF16 QUANT --traces T --policy P`, `gate --measured A B`."""
    parser.add_argument("baseline", metavar="BF16", nargs="?", help="the draft as released")
    parser.add_argument("candidate", metavar="QUANT", nargs="?", help="the quantized draft")
    parser.add_argument(
        "--tuned-baseline",
        metavar="TUNED",
        help="for a QUANT that 'retune' wrote, and there needed: the BF16 draft taught alike",
    )
    add_replay_arguments(parser, traces_required=False)
    add_measured_arguments(parser)
    parser.add_argument(
        "--policy",
        choices=typing.get_args(PolicyName),
        default="release",
        help="default: release, whatever QUANT's recipe asks for",
    )
    parser.add_argument(
        "--max-relative-drop",
        type=share,
        metavar="SHARE",
        help="margin instead of the policy's, such as 0.01 or 1%%",
    )
    parser.add_argument("--confidence", type=share, metavar="SHARE", help="instead of the policy's")
    parser.add_argument(
        "--min-prompts",
        type=int,
        metavar="PROMPTS",
        help="effective sample size, instead of the policy's (release: 30, which takes 35 to 60"
        " prompts)",
    )
    parser.add_argument(
        "--every-category-passes",
        action="store_true",
        help="PASS only if every category with enough prompts passes, not just if none fails",
    )
    parser.add_argument(
        "--unrecorded",
        action="store_true",
        help="QUANT needs no draftquant.json: another tool made it, and none of these prompts"
        " calibrated it",
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
        "--unrelated",
        action="store_true",
        help="compare two different drafts on purpose: QUANT need not be BF16 quantized",
    )
    parser.add_argument(
        "--expect-baseline",
        type=float,
        metavar="AL",
        help="acceptance length that BF16 is known to have with this K: confirms an unusual one",
    )
    parser.add_argument(
        "--report", type=Path, metavar="F.json", help="also write the JSON report here"
    )
    add_page_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...validate.judging.policy import resolve_policy
    from ...validate.report.document import document_of, document_text, parse_report
    from ...validate.served.joint_report import JointReport

    check_given(options)
    check_pages(options)
    policy = resolve_policy(
        options.policy,
        max_relative_drop=options.max_relative_drop,
        confidence=options.confidence,
        min_prompts=options.min_prompts,
        every_category_passes=options.every_category_passes,
        unrecorded=options.unrecorded,
    )
    look = parse_look(options.look, options.spending)
    measured = read_measured(options)
    on_traces = _judge_on_traces(options, policy, look) if options.traces else None
    report: GateReport | RetunedReport | JointReport
    if measured.nothing:
        assert on_traces is not None  # or there would be nothing to judge, see `check_given`
        report = on_traces.report
    else:
        report = judge_joint(options, measured, on_traces, policy, look)
    drafts, engines = judged_drafts(options, measured, on_traces)
    document = document_of(report, argv=asked_for(options.argv), drafts=drafts, engines=engines)
    text = document_text(document)
    if options.report or wants_pages(options):
        beside = {options.report: text} if options.report else {}
        write_pages(options, parse_report(text, "gate"), beside=beside)
    if options.json:
        print_json(document)
        return report.exit_code
    if on_traces is not None:
        print_replays(on_traces.replays)
    if isinstance(report, JointReport):
        print_joint(report)
    else:
        print_judged(report)
    return report.exit_code


def _judge_on_traces(
    options: argparse.Namespace, policy: "Policy", look: "Look | None"
) -> OnTraces:
    judged = Judged(
        baseline=options.baseline,
        candidate=options.candidate,
        tuned_baseline=options.tuned_baseline,
        traces=options.traces,
        unrelated=options.unrelated,
        expect_baseline=options.expect_baseline,
    )
    return judge_on_traces(judged, policy, look, settings_of(options), OnTerminal())
