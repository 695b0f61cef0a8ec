"""`draftquant gate --measured A B`: judge a quantized draft by what servers accepted.

Beside traces, or alone; with a second run of the baseline, and with what checks of parity found.
"""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..console import print_table, stdout, table
from .gate_report import (
    BOUNDS,
    COLOURS,
    bounds,
    print_figures,
    print_judged,
    print_served,
    print_ways_out,
)

if TYPE_CHECKING:
    from ...validate.judging.anomalies import Background
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.judging.interim_analysis import Look
    from ...validate.judging.judgement import GateReport
    from ...validate.judging.policy import Policy
    from ...validate.judging.retuned_gate import RetunedReport
    from ...validate.measure.measurement import Measurement
    from ...validate.parity.finding import Finding
    from ...validate.report.facts import Drafts, EngineFacts
    from ...validate.served.joint_report import JointReport

OF_TRACES = ("tuned_baseline", "num_draft_tokens", "target", "batch_size")
"""Options that mean nothing without traces, and have no default."""


class Replayed(Protocol):
    """What replays said."""

    @property
    def report(self) -> "GateReport | RetunedReport":
        """The verdict."""

    @property
    def background(self) -> "Background":
        """What it rests on."""

    @property
    def folders(self) -> "tuple[DraftFolder, ...]":
        """Baseline, candidate, and the BF16 draft taught alike where it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is judged beside traces, or instead of them."""

    runs: "tuple[Measurement, Measurement] | None"
    again: "Measurement | None"
    findings: "tuple[Finding, ...]"

    @property
    def nothing(self) -> bool:
        """Traces alone are judged."""
        return self.runs is None and not self.findings


def add_measured_arguments(parser: argparse.ArgumentParser) -> None:
    """`--measured`, `--baseline-again` and `--parity`."""
    parser.add_argument(
        "--measured",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="what `measure` wrote of servers with the BF16 and with the quantized draft: instead"
        " of traces, or beside them, and the worse verdict counts",
    )
    parser.add_argument(
        "--baseline-again",
        type=Path,
        metavar="A2",
        help="A measured once more: the noise of the server, held against the limit",
    )
    parser.add_argument(
        "--parity",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="what `parity --report` wrote: each finding enters the verdict",
    )


def check_given(options: argparse.Namespace) -> None:
    """Either two drafts and traces, or two measurements, or all of them.

    Raises:
        GateError: something is missing, or given without what it belongs to.
    """
    from ...validate.errors import GateError

    on_traces = [
        name
        for name, value in (
            ("BF16", options.baseline),
            ("QUANT", options.candidate),
            ("--traces", options.traces),
        )
        if value is None
    ]
    if on_traces and (options.measured is None or len(on_traces) < 3):
        raise GateError(
            "gate",
            f"expected BF16 QUANT --traces T, got no {', '.join(on_traces)}",
            fix="give all three; or two measurements, --measured A B; or all five",
        )
    if options.baseline_again and not options.measured:
        raise GateError(
            "--baseline-again", "expected --measured A B beside it", fix="add the two measurements"
        )
    idle = [name for name in OF_TRACES if getattr(options, name) is not None]
    if on_traces and idle:
        raise GateError(
            f"--{idle[0].replace('_', '-')}",
            "is of use for traces only, and none are given",
            fix="leave it out, or give BF16 QUANT --traces T too",
        )


def read_measured(options: argparse.Namespace) -> Measured:
    """Read what was measured; where it is not said, traces are replayed with the K that was served.

    Raises:
        MeasureError: a file is no whole measurement.
        ParityError: a file is no report of parity.
    """
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.parity.finding import read_findings

    runs = None
    if options.measured:
        baseline, candidate = (read_measurement(path) for path in options.measured)
        runs = baseline, candidate
        speculation = baseline.setup.speculation
        if options.traces and options.num_draft_tokens is None and speculation is not None:
            options.num_draft_tokens = speculation.num_draft_tokens
    again = options.baseline_again and read_measurement(options.baseline_again)
    findings = tuple(one for path in options.parity for one in read_findings(path))
    return Measured(runs=runs, again=again, findings=findings)


def judge_joint(
    options: argparse.Namespace,
    measured: Measured,
    replayed: Replayed | None,
    policy: "Policy",
    look: "Look | None",
) -> "GateReport | JointReport":
    """The verdict on two measurements alone, or the worst of all that is given.

    Raises:
        GateError: see `judge_measured` and `server_noise`.
    """
    from ...validate.judging.anomalies import Background
    from ...validate.served.joint_report import joint_report
    from ...validate.served.served_gate import judge_measured
    from ...validate.served.server_noise import server_noise

    served = noise = None
    if measured.runs is not None:
        background = Background(
            expected_baseline=options.expect_baseline, unrelated=options.unrelated
        )
        if replayed is not None:
            background = dataclasses.replace(replayed.background, head_agreement=None, warnings=())
        served = judge_measured(*measured.runs, policy, look=look, background=background)
        if measured.again is not None:
            noise = server_noise(measured.runs[0], measured.again, policy)
        elif replayed is None and not measured.findings:
            return served
    return joint_report(
        served=served,
        replayed=None if replayed is None else replayed.report,
        noise=noise,
        parity=measured.findings,
    )


def judged_drafts(
    options: argparse.Namespace, measured: Measured, replayed: Replayed | None
) -> "tuple[Drafts, tuple[EngineFacts, ...]]":
    """Who was judged, and what engines do with the candidate; none where no folder is at hand."""
    from ...validate.report.facts import Drafts, drafts_of, engine_facts, measured_facts

    if replayed is not None:
        names = (options.baseline, options.candidate, options.tuned_baseline)
        drafts = drafts_of(names[: len(replayed.folders)], replayed.folders)
        return drafts, engine_facts(replayed.folders[1].folder, drafts.candidate.name)
    assert measured.runs is not None  # or there is nothing to judge, see `check_given`
    baseline, candidate = map(measured_facts, measured.runs)
    return Drafts(baseline=baseline, candidate=candidate), ()


def print_joint(report: "JointReport") -> None:
    """Print every judgement, and the worst verdict."""
    out = stdout()
    if report.replayed is not None:
        print_judged(report.replayed)
    if report.served is not None:
        print_served(report.served)
        print_figures(report.served, ", served")
    if report.noise is not None and report.noise.change is not None:
        found = table("The baseline measured again", "run", *BOUNDS, "equal outputs")
        found.row(
            report.noise.name,
            *bounds(report.noise.change),
            f"{report.noise.served.identical_share:.1%}",
        )
        print_table(found)
    out.line((report.verdict, f"bold {COLOURS[report.verdict]}"), ", the worst of:")
    for title, verdict, reason, _ in report.parts:
        out.line(f"  {title}: ", (verdict, COLOURS[verdict]), f". {reason}")
    print_ways_out(report.action)
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")
