"""`gate`: may the quantized draft replace the BF16 one?

On the same traces, or by measurements of servers, or both; and by findings of parity checks.
"""

import re
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...recipes.brief import apart
from ...validate.runs.judging_asked import GateRun
from ..frame import reports
from ..frame.console import print_table, stdout, table
from ..frame.verb import Command, verb
from .replay import print_replays

if TYPE_CHECKING:
    from ...validate.judging.judgement import GateReport
    from ...validate.runs.gate_run import Judged
    from ...validate.served.joint_report import JointReport


@verb(GateRun)
def gate(settings: GateRun) -> "reports.GateReport | reports.JointReport":
    """Judge a quantized draft against its BF16 source: PASS, FAIL, INCONCLUSIVE or ANOMALOUS.

    Example:
        >>> report = dq.gate("DRAFT", "OUT", "TRACES", min_prompts=10)
        >>> report.verdict in ("PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS")
        True
        >>> report.exit_code == 0 or bool(report.action)
        True

    Returns:
        The verdict with all its evidence. It is a `GateReport` for one comparison, and a
        `JointReport` where measurements or parity were judged beside traces. Each writes its page,
        Markdown, JUnit and JSON by methods.

    Raises:
        GateError: the drafts do not belong together, or a limit is out of its range.
        DraftQuantError: a draft, the traces, a measurement or a parity report cannot be read, they
            do not fit each other or do not fit in memory, or a report file cannot be written.
    """
    from ...validate.runs.gate_run import judged

    return judged(settings).report


COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "ANOMALOUS": "magenta"}
BOUNDS = ("change", "lower bound", "upper bound")
Places = Mapping[str, str]
"""BF16 or QUANT in commands to copy -> what was given."""
NOTHING: Places = MappingProxyType({})
_PLACE = re.compile(r"\b[A-Z][A-Z0-9]+\b")


def print_gate(report: "GateReport", places: Places = NOTHING) -> None:
    """Print the statistic, the categories, the verdict and the warnings."""
    if report.served is not None:
        print_served(report)
    print_figures(report)
    _print_verdict(report, places)


def print_figures(report: "GateReport", comparison: str = "") -> None:
    """Print the statistic, the categories and the compared drafts."""
    out = stdout()
    if report.change is not None:
        look = report.look
        planned = f", planned interim analysis {look.number} of {look.total}" if look else ""
        numbers = (*BOUNDS, "confidence", "prompts", "effective sample size")
        rows = table(f"Gate{planned}{comparison}", "policy", "limit", *numbers)
        rows.row(
            report.policy.name,
            f"{-report.policy.max_relative_drop:+.2%}",
            *report.change.in_percent(report.policy.max_relative_drop),
            f"{report.change.confidence:.2%}",
            report.sample,
            apart(report.change.effective_num_prompts, report.policy.min_prompts, ".1f"),
        )
        print_table(rows)
    if report.parts.all:
        _print_parts(report)
    if report.context_bins:
        lengths = (
            f"{p.category.removeprefix('context ')} {p.baseline_mean_acceptance_length:.4f} ->"
            f" {p.candidate_mean_acceptance_length:.4f}"
            for p in report.context_bins
        )
        out.line(f"acceptance length by tokens before the verify step: {', '.join(lengths)}")
    out.line(
        f"target {_target(report)}, baseline {report.baseline.name}"
        f" ({_short(report.background.baseline_sha256)}), candidate {report.candidate.name}"
        f" ({_short(report.background.candidate_sha256)})"
    )


def _target(report: "GateReport") -> str:
    if report.traces is not None:
        target = report.traces.target
        return f"{target.name} ({_short(target.weights_sha256)})"
    return report.served.model if report.served is not None else "not known"


def print_served(report: "GateReport") -> None:
    """Print one row per measurement, and what the other estimates say."""
    from ...validate.report import words

    served, out = report.served, stdout()
    assert served is not None  # of a report on measurements
    by, who = f"Served by {words.server(served)}", "servers"
    if served.of_targets:
        by, who = "Replayed beside two targets", "targets"
    positions = [f"pos {i + 1}" for i in range(report.num_draft_tokens)]
    numbers = ("acceptance length", "as compared", *positions)
    rows = table(
        f"{by}, K = {report.num_draft_tokens}, {report.sample} prompts",
        "run",
        *numbers,
    )
    lengths = (served.baseline_mean_acceptance_length, served.candidate_mean_acceptance_length)
    for figures, length in zip((report.baseline, report.candidate), lengths, strict=True):
        told = served.told_positions
        survival = (f"{share:.3f}" if told else words.NONE for share in figures.survival)
        rows.row(figures.name, f"{length:.4f}", f"{figures.mean_acceptance_length:.4f}", *survival)
    print_table(rows)
    if report.change is None:
        return
    if served.identical_share is None or served.common_share is None:
        out.line("the tool keeps no outputs, so nothing shows whether both servers wrote the same")
        return
    out.line(
        f"{served.identical_share:.1%} of the outputs are identical, and both {who} wrote"
        f" {served.common_share:.1%} of the tokens before their outputs differed; compared by"
        f" {words.estimator(served.estimator)}"
    )
    others = (("whole outputs", served.whole_change), ("identical text only", served.common_change))
    for name, change in others:
        if change is not None:
            by, lower, upper = change.in_percent()
            out.line(f"  by {name}: {by}, bounds {lower} and {upper}")


def _print_verdict(report: "GateReport", places: Places) -> None:
    out, colour = stdout(), COLOURS[report.verdict]
    out.line((report.verdict, f"bold {colour}"), f": {report.reason}")
    _print_ways_out(report.action, places)
    out.warnings(report.warnings)


def _print_parts(report: "GateReport") -> None:
    """Print parts whose bounds tell anything; a warning names those that were not judged."""
    from ...validate.report import words

    told = [part for part in report.parts.all if part.bounds_are_shown]
    if not told:
        return
    title = "Categories and context bins" if report.context_bins else "Categories"
    rows = table(title, "category", "prompts", "limit", *BOUNDS, "outcome")
    for part in told:
        rows.row(
            part.category,
            str(part.num_prompts),
            f"{-part.max_relative_drop:+.2%}",
            *(part.change.in_percent(part.max_relative_drop) if part.change else ("", "", "")),
            part.outcome or "too few prompts",
        )
    print_table(rows)
    if (together := words.together(report.parts)) is not None:
        stdout().line(together)


def _print_ways_out(action: str | None, places: Places) -> None:
    from ...validate.report.words import way_out

    ways = action.splitlines() if action else []
    for way in ways:
        sentence, command = way_out(way)
        stdout().line(f"  - {sentence}" if len(ways) > 1 else f"  {sentence}")
        if command:
            known = _PLACE.sub(lambda match: places.get(match[0], match[0]), command)
            stdout().line(f"      {known}")


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "not known"


def print_joint(report: "JointReport", places: Places) -> None:
    """Print every judgement, and the worst verdict."""
    out = stdout()
    if report.replayed is not None:
        print_gate(report.replayed, places)
    if report.served is not None:
        print_served(report.served)
        print_figures(report.served, ", served")
    if report.noise is not None and report.noise.change is not None:
        rows = table("The baseline measured again", "run", *BOUNDS, "equal outputs")
        rows.row(
            report.noise.name,
            *report.noise.change.in_percent(),
            f"{report.noise.served.identical_share:.1%}",
        )
        print_table(rows)
    out.line((report.verdict, f"bold {COLOURS[report.verdict]}"), ", the worst of:")
    for title, verdict, reason, _ in report.parts:
        out.line(f"  {title}: ", (verdict, COLOURS[verdict]), f". {reason}")
    _print_ways_out(report.action, places)
    out.warnings(report.warnings)


def _show(judged: "Judged", settings: GateRun) -> None:
    from ...validate.served.joint_report import JointReport

    if judged.replays:
        print_replays(judged.replays)
    places = _places(settings)
    if isinstance(judged.report, JointReport):
        print_joint(judged.report, places)
    else:
        print_gate(judged.report, places)


def _places(settings: GateRun) -> Mapping[str, str]:
    """BF16 and so on in commands to copy -> what was given here."""
    given = {
        "BF16": settings.baseline,
        "QUANT": settings.candidate,
        "TRACES": settings.traces,
        "TARGET": settings.target,
    }
    return {name: shlex.quote(str(place)) for name, place in given.items() if place is not None}


def _judged(settings: GateRun) -> "Judged":
    from ...validate.runs.gate_run import judged

    return judged(settings)


COMMAND = Command(
    gate,
    _show,
    lambda judged, _: judged.document,
    exit_code=lambda judged: judged.report.exit_code,
    run_whole=_judged,
)
