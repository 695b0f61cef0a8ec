"""`draftquant gate`: judge a quantized draft against its BF16 source on the same traces.

A draft that its target taught is judged against the BF16 draft taught alike too: see `retuned`.
"""

import argparse
import json
import math
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.checkpoint import CONFIG_FILE
from ...quantize.files.hub import resolve_draft
from ...quantize.files.provenance import QuantizedProvenance
from ...quantize.files.staging import check_output, write_text
from ...recipes.expectations import PolicyName
from ...validate.looks import Spending, parse_look
from ..console import print_json, print_table, stdout, table
from .replay import print_replays
from .replaying import add_replay_arguments, load_for_replay, replay_loaded

if TYPE_CHECKING:
    from ...calibration.traces.folder import TraceFolder
    from ...validate.gate import GateReport
    from ...validate.paired import PairedChange
    from ...validate.retuned import RetunedReport

COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "ANOMALOUS": "magenta"}
BOUNDS = ("change", "lower bound", "upper bound")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`gate BF16 QUANT --traces T --policy P`."""
    parser.add_argument("baseline", metavar="BF16", help="the draft as released")
    parser.add_argument("candidate", metavar="QUANT", help="the quantized draft")
    parser.add_argument(
        "--tuned-baseline",
        metavar="B",
        help="for a QUANT that 'retune' wrote, and there needed: the BF16 draft taught alike",
    )
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
        "--report", type=Path, metavar="FILE", help="also write the JSON report here"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...calibration.traces.folder import TraceFolder
    from ...calibration.traces.head_agreement import head_agreement
    from ...validate.doubts import Background
    from ...validate.gate import judge
    from ...validate.held_out import check_held_out
    from ...validate.pairing import DraftFolder, check_folders, check_loaded
    from ...validate.policy import resolve_policy
    from ...validate.retuned import check_tuned_baseline, judge_retuned

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
    if options.report:
        write_text(options.report, json.dumps(report.to_mapping(), indent=2) + "\n")
    if options.json:
        print_json(report.to_mapping())
    else:
        print_replays(replays)
        print_judged(report)
    return report.exit_code


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


def print_judged(report: "GateReport | RetunedReport") -> None:
    """Print one comparison, or both of a draft that its target taught."""
    from ...validate.retuned import MARK, RULE, RetunedReport

    if not isinstance(report, RetunedReport):
        print_gate(report)
        return
    out = stdout()
    _print_figures(report.against_tuned, ", against BF16 taught alike: quantization")
    _print_figures(report.against_bf16, ", against BF16 as released: quantization and training")
    if report.training is not None:
        change, lower, upper = _bounds(report.training)
        out.line(f"training alone changed BF16 by {change}, bounds {lower} and {upper}")
    out.line((MARK, "bold magenta"), f": {RULE}")
    _print_verdict(report)


def print_gate(report: "GateReport") -> None:
    """Print the statistic, the categories, the verdict and the warnings."""
    _print_figures(report)
    _print_verdict(report)


def _print_figures(report: "GateReport", comparison: str = "") -> None:
    out = stdout()
    if report.change is not None:
        look = f", look {report.look.number} of {report.look.total}" if report.look else ""
        numbers = (*BOUNDS, "confidence", "prompts", "effective")
        found = table(f"Gate{look}{comparison}", "policy", "limit", *numbers)
        found.row(
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
    target = report.traces.target
    out.line(
        f"target {target.name} ({_short(target.weights_sha256)}), baseline {report.baseline.name}"
        f" ({_short(report.background.baseline_sha256)}), candidate {report.candidate.name}"
        f" ({_short(report.background.candidate_sha256)})"
    )


def _print_verdict(report: "GateReport | RetunedReport") -> None:
    out, colour = stdout(), COLOURS[report.verdict]
    out.line((report.verdict, f"bold {colour}"), f": {report.reason}")
    if report.action:
        out.line(f"  {report.action}")
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


def _print_categories(report: "GateReport") -> None:
    found = table("Categories", "category", "prompts", "limit", *BOUNDS, "outcome")
    for own in report.categories:
        found.row(
            own.category,
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


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "not known"
