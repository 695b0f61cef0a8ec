"""`estimate`: bytes, time and break-even acceptance of a draft, from headers alone."""

from collections.abc import Callable

from ...quantize.asked import Estimating
from ...quantize.estimate.draft_step import USUAL_CONTEXT
from ...quantize.estimate.estimate_report import Candidate, EstimateReport, assumptions, to_mapping
from ...quantize.estimate.work import Machine, Part
from ...quantize.gpus import USUAL_GPUS
from ..frame import reports
from ..frame.console import megabytes, print_table, stdout, table
from ..frame.verb import Command, verb


@verb(
    Estimating, figures={"usual_gpus": ", ".join(USUAL_GPUS), "usual_context": str(USUAL_CONTEXT)}
)
def estimate(settings: Estimating) -> "reports.EstimateReport":
    """Estimate how long one draft step takes, and how much acceptance quantization may cost.

    Returns:
        Bytes and milliseconds of the unquantized draft and of each recipe's draft, on each GPU.

    Raises:
        DraftQuantError: the draft, a recipe or a GPU cannot be estimated.
    """
    from ...quantize.estimated import estimate_draft

    return estimate_draft(settings)


def _show(report: EstimateReport, _settings: object) -> None:
    out, draft = stdout(), report.draft
    out.line(
        (str(draft.checkpoint.folder), "bold"),
        f": {draft.family.name}, {report.parameters:,} parameters; K ="
        f" {report.num_draft_tokens}, context {report.context:,}, tp {report.tp}",
    )
    _print_bytes(report)
    for name, reason in report.refused.items():
        out.line(f"{name} does not fit this draft: {reason}")
    at = f"at concurrency {report.concurrency}"
    _print_by_gpu(report, f"Roofline: draft step / all drafting in µs, {at}", _times)
    if report.verify_seconds is None:
        out.line("break-even acceptance needs the target's measured verify step: --target-step-ms")
    else:
        what = "Break-even: the largest loss of acceptance length at which quantizing pays"
        verify = f"{1e3 * report.verify_seconds:g}"
        _print_by_gpu(report, f"{what}, beside a verify step of {verify} ms {at}", _loss)
    by_gpu = report.loaded_by.values()
    if any(engines == [] for by_name in by_gpu for engines in by_name.values()):
        out.line("† no stock engine is known to load it there (draftquant check)")
    out.line("Assumed")
    for line in assumptions(report):
        out.line(f"  {line}")


def _print_bytes(report: EstimateReport) -> None:
    parts: tuple[Part, ...] = ("attention", "mlp", "head")
    numbers = ("stored", *parts, "rest", "step", "share", "drafting", "share of it")
    rows = table("Bytes read at concurrency 1", "draft", *numbers,
                  spare=("share of it", *parts, "rest"))  # fmt: skip
    before = report.candidates[0].round
    for candidate in report.candidates:
        step, whole = candidate.round.step.nbytes(1), candidate.round.nbytes(1)
        by_part = [candidate.round.step.nbytes(1, part) for part in parts]
        rows.row(
            candidate.name,
            megabytes(candidate.stored_bytes),
            *map(megabytes, by_part),
            megabytes(step - sum(by_part)),
            megabytes(step),
            f"{step / before.step.nbytes(1):.1%}",
            megabytes(whole),
            f"{whole / before.nbytes(1):.1%}",
        )
    print_table(rows)


def _print_by_gpu(
    report: EstimateReport, title: str, cell: Callable[[EstimateReport, Candidate, Machine], str]
) -> None:
    names = tuple(machine.gpu.name for machine in report.machines)
    rows = table(title, "draft", *names)
    for candidate in report.candidates:
        cells = []
        for machine in report.machines:
            engines = report.loaded_by.get(candidate.name, {}).get(machine.gpu.name)
            cells.append(cell(report, candidate, machine) + (" †" if engines == [] else ""))
        rows.row(candidate.name, *cells)
    print_table(rows)


def _times(report: EstimateReport, candidate: Candidate, machine: Machine) -> str:
    seconds = (
        machine.pass_seconds(candidate.round.step, report.concurrency),
        machine.round_seconds(candidate.round, report.concurrency),
    )
    return " / ".join(f"{1e6 * s:,.0f}" if s >= 1e-4 else f"{1e6 * s:.3g}" for s in seconds)


def _loss(report: EstimateReport, candidate: Candidate, machine: Machine) -> str:
    loss = report.break_even(candidate, machine) or 0.0
    return f"{loss:.2%}" if loss > 0 else "no gain" if loss == 0 else f"slower by {-loss:.2%}"


COMMAND = Command(estimate, _show, lambda report, _: to_mapping(report))
