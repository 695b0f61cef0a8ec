"""The one sentence that an estimate comes to: what to serve on a GPU, and what it gains."""

from .draft_length import said
from .estimate_report import EstimateReport
from .step_estimate import Candidate
from .work import Machine


def advice(report: EstimateReport, machine: Machine) -> str:
    """What pays most of what engines serve there, by how much, and how much the head is of it."""
    estimate, name = report.estimate, machine.gpu.name
    whole = estimate.baseline.round
    first = report.concurrencies[0]
    share = whole.nbytes(first, "head") / whole.nbytes(first)
    head = f"the head is {share:.0%} of what drafting reads"
    if not any(report.engines(one, machine.gpu) for one in estimate.candidates[1:]):
        return f"On {name} no engine is known to serve any of these; {head}."
    best = best_served(report, machine)
    if best is None:
        return f"On {name} none of these gains anything: serve {estimate.baseline.name}; {head}."
    return f"On {name} take {best.name}: {_gains(report, machine, best)}; {head}."


def best_served(report: EstimateReport, machine: Machine) -> Candidate | None:
    """What the sentence is about; None where that is the draft as it is."""
    served = [one for one in report.estimate.candidates[1:] if report.engines(one, machine.gpu)]
    best = max(served, key=lambda one: _worth(report, machine, one), default=None)
    return best if best is not None and _worth(report, machine, best) > 0 else None


def _worth(report: EstimateReport, machine: Machine, one: Candidate) -> float:
    """Relative gains in tokens per second, over all concurrencies; else in the time of drafting."""
    gains = _speed_gains(report, machine, one)
    if gains:
        return sum(gain for _, gain in gains)
    before, after = _drafting(report, machine, one)
    return before / after - 1


def _speed_gains(
    report: EstimateReport, machine: Machine, one: Candidate
) -> list[tuple[int, float]]:
    """By concurrency: as measured, or if it loses no acceptance; nothing without a target."""
    ours = report.lengths_of(report.estimate.baseline, machine.gpu)
    if ours:
        theirs = report.lengths_of(one, machine.gpu)
        return [
            (a.concurrency, b.best.tokens_per_second / a.best.tokens_per_second - 1)
            for a, b in zip(ours, theirs, strict=True)
        ]
    points = report.break_even(one, machine)
    return [(point.concurrency, 1 / (1 - point.loss) - 1) for point in points]


def _gains(report: EstimateReport, machine: Machine, one: Candidate) -> str:
    gains = _speed_gains(report, machine, one)
    if not gains:
        before, after = (f"{1e6 * seconds:,.0f}" for seconds in _drafting(report, machine, one))
        return (
            f"drafting takes {after} µs instead of {before} at concurrency"
            f" {report.concurrencies[0]}; whether that pays depends on the target's verify step"
        )
    ends = dict.fromkeys((gains[0], gains[-1]))
    gained = " and ".join(f"{gain:+.1%} tokens per second at {c}" for c, gain in ends)
    advised = report.lengths_of(one, machine.gpu)
    if advised:
        accepted = "" if advised[0].own else f" if it accepts as {report.estimate.baseline.name}"
        return f"{gained}{accepted}, with K {said(advised)}"
    points = {point.concurrency: point.loss for point in report.break_even(one, machine)}
    losses = " and ".join(f"{points[c]:.2%}" for c, _ in ends)
    return f"{gained} if it accepts as much as now, and it may lose {losses} of its acceptance"


def _drafting(report: EstimateReport, machine: Machine, one: Candidate) -> tuple[float, float]:
    first = report.concurrencies[0]
    before, after = (
        machine.round_seconds(each.round, first) for each in (report.estimate.baseline, one)
    )
    return before, after
