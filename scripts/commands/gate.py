"""`draftquant gate`: judge a quantized draft against its BF16 source.

On the same traces, or by measurements of servers, or both: see `gate_measured`. A draft that its
target taught is judged against the BF16 draft taught alike too: see `retuned`.
"""

import argparse
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.checkpoint import CONFIG_FILE
from ...quantize.files.hub import resolve_draft
from ...quantize.files.provenance import QuantizedProvenance
from ...recipes.expectations import PolicyName
from ...validate.looks import Spending, parse_look
from ..console import print_json
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
from .replaying import add_replay_arguments, load_for_replay, replay_loaded
from .report_outputs import (
    add_page_arguments,
    asked_for,
    check_pages,
    wants_pages,
    write_pages,
)

if TYPE_CHECKING:
    from ...calibration.traces.folder import TraceFolder
    from ...validate.doubts import Background
    from ...validate.draft_replay import DraftReplay
    from ...validate.gate import GateReport
    from ...validate.looks import Look
    from ...validate.pairing import DraftFolder
    from ...validate.policy import Policy
    from ...validate.retuned import RetunedReport


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTraces:
    """What replays said; `background` is what they were judged with.

    Attributes:
        folders: baseline, candidate, and the BF16 draft taught alike where it was given.
    """

    replays: "Sequence[DraftReplay]"
    report: "GateReport | RetunedReport"
    background: "Background"
    folders: "tuple[DraftFolder, ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`gate BF16 QUANT --traces T --policy P`, `gate --measured A B`."""
    parser.add_argument("baseline", metavar="BF16", nargs="?", help="the draft as released")
    parser.add_argument("candidate", metavar="QUANT", nargs="?", help="the quantized draft")
    parser.add_argument(
        "--tuned-baseline",
        metavar="B",
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
        metavar="X",
        help="margin instead of the policy's, such as 0.01 or 1%%",
    )
    parser.add_argument("--confidence", type=share, metavar="C", help="instead of the policy's")
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
    from ...validate.policy import resolve_policy
    from ...validate.report.document import document_of, document_text, parse_report
    from ...validate.served.joint import JointReport

    check_given(options)
    check_pages(options)
    policy = resolve_policy(
        options.policy,
        max_relative_drop=options.max_relative_drop,
        confidence=options.confidence,
        min_prompts=options.min_prompts,
        every_category_passes=options.every_category_passes,
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
    from ...calibration.traces.folder import TraceFolder
    from ...calibration.traces.head_agreement import head_agreement
    from ...validate.doubts import Background
    from ...validate.gate import judge
    from ...validate.held_out import check_held_out
    from ...validate.pairing import DraftFolder, check_folders, check_loaded
    from ...validate.retuned import check_tuned_baseline, judge_retuned

    references = [options.baseline, options.candidate]
    baseline, candidate = (DraftFolder.read(resolve_draft(name).folder) for name in references)
    tuned = None
    if options.tuned_baseline:
        references.append(options.tuned_baseline)
        tuned = DraftFolder.read(resolve_draft(options.tuned_baseline).folder)
    warnings = check_folders(baseline, candidate, unrelated=options.unrelated)
    warnings += check_tuned_baseline(baseline, candidate, tuned, unrelated=options.unrelated)
    traces = TraceFolder.open(options.traces)
    warnings += check_held_out(candidate.quantized_by, traces)
    loaded = load_for_replay(references, traces, options)
    warnings += check_loaded(*loaded.both, candidate, unrelated=options.unrelated)
    if tuned is not None:
        warnings += check_loaded(loaded.drafts[0], loaded.drafts[2], tuned)
    warnings += _target_warnings(options.target, traces)
    warnings += other_policy_warnings(candidate.quantized_by, options.policy)
    replays = replay_loaded(loaded, options)
    background = Background(
        baseline_sha256=baseline.sha256,
        candidate_sha256=candidate.sha256,
        head_agreement=head_agreement(traces, loaded.tables),
        expected_baseline=options.expect_baseline,
        unrelated=options.unrelated,
        algorithm_to_try=algorithm_to_try(candidate.quantized_by),
        warnings=warnings,
    )
    report: GateReport | RetunedReport
    if tuned is None:
        report = judge(replays[0], replays[1], policy, look=look, background=background)
    else:
        report = judge_retuned(
            replays, policy, look=look, background=background, tuned_sha256=tuned.sha256
        )
    folders = (baseline, candidate) if tuned is None else (baseline, candidate, tuned)
    return OnTraces(replays=replays, report=report, background=background, folders=folders)


def other_policy_warnings(
    candidate: QuantizedProvenance | None, policy: PolicyName
) -> tuple[str, ...]:
    """A candidate does not choose its own judge, but what its recipe asks for is said."""
    if candidate is None or candidate.recipe.gate.policy == policy:
        return ()
    asked = candidate.recipe.gate.policy
    return (f"the candidate's recipe asks for the policy {asked!r}, in use is {policy!r}",)


def algorithm_to_try(candidate: QuantizedProvenance | None) -> str | None:
    """What may round the candidate's four bits better than it was done."""
    if candidate is None or candidate.recipe.algorithm.rounding != "nearest":
        return None
    return None if candidate.recipe.weights.dtype == "fp8_e4m3" else "gptq"


def _target_warnings(target: Path | None, traces: "TraceFolder") -> tuple[str, ...]:
    """The tables of a target that was not recorded make another draft of both."""
    from ...calibration.traces.folder import file_sha256

    recorded = traces.manifest.target
    if target is None or file_sha256(target / CONFIG_FILE) == recorded.config_sha256:
        return ()
    if recorded.config_sha256 is None:
        return (
            f"the traces do not say which {CONFIG_FILE} their target {recorded.name} had: whether"
            f" --target {target.name} is that target is not known",
        )
    return (
        f"--target {target.name} has another {CONFIG_FILE} than the target {recorded.name} that was"
        " recorded: embedding and head may be those of another target",
    )
