"""What the gate prints: bounds, categories, the verdict and its warnings."""

from typing import TYPE_CHECKING

from ..console import print_table, stdout, table

if TYPE_CHECKING:
    from ...validate.counting.paired_change import PairedChange
    from ...validate.judging.judgement import GateReport
    from ...validate.judging.retuned_gate import RetunedRecord
    from ...validate.served.joint_report import JointReport

COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "ANOMALOUS": "magenta"}
BOUNDS = ("change", "lower bound", "upper bound")


def print_judged(report: "GateReport | RetunedRecord") -> None:
    """Print one comparison, or both of a draft that its target taught."""
    from ...validate.judging.retuned_gate import MARK, RULE, RetunedRecord, RetunedReport

    if not isinstance(report, RetunedRecord):
        print_gate(report)
        return
    out = stdout()
    print_figures(report.against_tuned, ", against BF16 taught alike: quantization")
    print_figures(report.against_bf16, ", against BF16 as released: quantization and training")
    if isinstance(report, RetunedReport) and report.training is not None:
        change, lower, upper = bounds(report.training)
        out.line(f"training alone changed BF16 by {change}, bounds {lower} and {upper}")
    out.line((MARK, "bold magenta"), f": {RULE}")
    _print_verdict(report)


def print_gate(report: "GateReport") -> None:
    """Print the statistic, the categories, the verdict and the warnings."""
    if report.served is not None:
        print_served(report)
    print_figures(report)
    _print_verdict(report)


def print_figures(report: "GateReport", comparison: str = "") -> None:
    """Print the statistic, the categories and who was compared."""
    out = stdout()
    if report.change is not None:
        look = f", look {report.look.number} of {report.look.total}" if report.look else ""
        numbers = (*BOUNDS, "confidence", "prompts", "effective")
        found = table(f"Gate{look}{comparison}", "policy", "limit", *numbers)
        found.row(
            report.policy.name,
            f"{-report.policy.max_relative_drop:+.2%}",
            *bounds(report.change),
            f"{report.change.confidence:.2%}",
            str(report.num_prompts),
            f"{report.change.effective_num_prompts:.1f}",
        )
        print_table(found)
    if report.categories:
        _print_categories(report)
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
    served, out = report.served, stdout()
    assert served is not None  # of a report on measurements
    positions = [f"pos {i + 1}" for i in range(report.num_draft_tokens)]
    numbers = ("acceptance length", "as compared", *positions)
    found = table(
        f"Served by {served.engine} {served.version}, K = {report.num_draft_tokens},"
        f" {report.num_prompts} prompts",
        "run",
        *numbers,
        right=numbers,
    )
    lengths = (served.baseline_mean_acceptance_length, served.candidate_mean_acceptance_length)
    for figures, length in zip((report.baseline, report.candidate), lengths, strict=True):
        survival = (f"{share:.3f}" for share in figures.survival)
        found.row(figures.name, f"{length:.4f}", f"{figures.mean_acceptance_length:.4f}", *survival)
    print_table(found)
    if report.change is None:
        return
    out.line(
        f"{served.identical_share:.1%} of the outputs are equal, {served.common_share:.1%} of their"
        f" tokens common; compared by {served.estimator}"
    )
    others = (("whole outputs", served.whole_change), ("common text alone", served.common_change))
    for name, change in others:
        if change is not None:
            by, lower, upper = bounds(change)
            out.line(f"  by {name}: {by}, bounds {lower} and {upper}")


def _print_verdict(report: "GateReport | RetunedRecord") -> None:
    out, colour = stdout(), COLOURS[report.verdict]
    out.line((report.verdict, f"bold {colour}"), f": {report.reason}")
    print_ways_out(report.action)
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


def _print_categories(report: "GateReport") -> None:
    """Those that were judged, or lost much; the others, which the report has, in one row."""
    found = table("Categories", "category", "prompts", "limit", *BOUNDS, "outcome")
    told = [own for own in report.categories if own.outcome or own.certainly_lost]
    for own in told:
        found.row(
            own.category,
            str(own.num_prompts),
            f"{-own.max_relative_drop:+.2%}",
            *(bounds(own.change) if own.change else ("", "", "")),
            own.outcome or "too small",
        )
    if not told:  # a warning says so
        return
    sizes = [own.num_prompts for own in report.categories if own not in told]
    if sizes:
        each = f"{min(sizes)} to {max(sizes)} each" if len(sizes) > 1 else str(sizes[0])
        others = f"{len(sizes)} small one{'s' if len(sizes) > 1 else ''}"
        found.row(others, each, "", "", "", "", "too small")
    print_table(found)


def print_ways_out(action: str | None) -> None:
    """What to do about a verdict, one way out a line."""
    ways = action.splitlines() if action else []
    for way in ways:
        stdout().line(f"  - {way}" if len(ways) > 1 else f"  {way}")


def bounds(change: "PairedChange") -> tuple[str, str, str]:
    """A change and both of its bounds, in percent."""
    lower, upper = change.relative_bounds
    return f"{change.relative_change:+.2%}", f"{lower:+.2%}", f"{upper:+.2%}"


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "not known"


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
