"""`draftquant parity`: what speculation, or quantizing, changes of what is said."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...validate.parity.task_run import TaskRun
from ...validate.runs.parity_asked import DivergenceRun, DraftParityRun, SampledRun, TasksRun
from ..frame import reports
from ..frame.console import print_table, stdout, table
from ..frame.verb import Command, verb
from .gate import COLOURS

if TYPE_CHECKING:
    from ...validate.parity.finding import Findings, ParityFinding


@verb(DivergenceRun)
def parity_divergence(settings: DivergenceRun) -> "reports.Findings":
    """Compare the greedy output of a target with a draft and without, up to the first difference.

    Returns:
        One finding for each speculative measurement.

    Raises:
        DraftQuantError: the measurements cannot be read, or do not have the same prompts.
    """
    from ...validate.runs.parity_runs import divergence_found

    return divergence_found(settings)


@verb(DraftParityRun)
def parity_draft(settings: DraftParityRun) -> "reports.Findings":
    """Compare the proposals of a quantized draft with those of the BF16 draft, at each draft step.

    Returns:
        One finding for each figure, with its parts by draft step and by category.

    Raises:
        DraftQuantError: a draft or the traces cannot be read, or they do not fit each other.
    """
    from ...validate.runs.parity_runs import draft_found

    return draft_found(settings)


@verb(TaskRun)
def parity_run_tasks(settings: TaskRun) -> "Mapping[str, reports.TaskSamples]":
    """Run tasks of lm_eval against a server, and keep the samples for `parity_tasks`.

    Returns:
        Task -> the samples that lm_eval wrote.

    Raises:
        DraftQuantError: the server is not the expected one, or lm_eval fails; the error quotes
            lm_eval's own text.
    """
    from ...validate.parity.lm_eval_tasks import run_tasks

    return run_tasks(settings)


@verb(SampledRun, exclusive=("target", "score_server"))
def parity_sampled(settings: SampledRun) -> "reports.Findings":
    """Compare how likely sampled output is to the target, with a draft and without.

    Returns:
        One finding.

    Raises:
        DraftQuantError: the measurements do not fit each other, or no target is given that can
            score them.
    """
    from ...validate.runs.parity_runs import sampled_found

    return sampled_found(settings)


@verb(TasksRun)
def parity_tasks(settings: TasksRun) -> "reports.Findings":
    """Compare the scores that two servers got for the same items of lm_eval.

    Returns:
        One finding for each metric of each task.

    Raises:
        DraftQuantError: the samples cannot be read, or do not hold the same items.
    """
    from ...validate.runs.parity_runs import tasks_found

    return tasks_found(settings)


def _show_tasks(report: "Findings", _settings: object) -> None:
    for finding in report.findings:
        _print_scores(finding)
    _show(report, _settings)


def _show_draft(report: "Findings", _settings: object) -> None:
    _print_parts(report.findings)
    _show(report, _settings)


Samples = Mapping[str, "reports.TaskSamples"]


def _items(samples: Samples, _settings: object) -> dict[str, Any]:
    return {
        task: {
            "samples": str(task_samples.path),
            "items": {name: len(items) for name, items in task_samples.items.items()},
        }
        for task, task_samples in samples.items()
    }


def _show_items(samples: Samples, _settings: object) -> None:
    for task, task_samples in samples.items():
        counts = ", ".join(f"{len(items):,} ({name})" for name, items in task_samples.items.items())
        stdout().line((task, "bold"), f": items {counts}: {task_samples.path}")


def _mapping(report: "Findings", _settings: object) -> Any:
    from ...validate.parity.finding import to_mapping

    return to_mapping(report.findings)


def _show(report: "Findings", _settings: object) -> None:
    rows = table("Parity", "check", "of", "figure", "lower bound", "upper bound",
                 "threshold", "verdict")  # fmt: skip
    for finding in report.findings:
        figures = (finding.estimate, finding.lower, finding.upper, finding.threshold)
        cells = ("" if figure is None else f"{figure:.4g}" for figure in figures)
        rows.row(finding.check, finding.what, *cells, finding.verdict)
    print_table(rows)
    for finding in report.findings:
        stdout().line(
            (finding.verdict, f"bold {COLOURS[finding.verdict]}"),
            f": {finding.what}: {finding.reason}",
        )


def _print_scores(finding: "ParityFinding") -> None:
    details = finding.details[0]
    counts = ""
    if "mcnemar_p" in details:
        counts = (
            f"; only A right {details['only_first_right']}, only B right"
            f" {details['only_second_right']}, McNemar p = {details['mcnemar_p']:.3f}"
        )
    stdout().line(
        f"{finding.what}: A {details['first']:.4f}, B {details['second']:.4f}"
        f" over {details['items']:,} items{counts}"
    )


def _print_parts(findings: "Sequence[ParityFinding]") -> None:
    rows = table("By step and category", "of", *(finding.what for finding in findings))
    parts = [(key, row[key]) for key in ("step", "category") for row in findings[0].details
             if key in row]  # fmt: skip
    for key, part in parts:
        cells = []
        for finding in findings:
            estimates = [row["estimate"] for row in finding.details if row.get(key) == part]
            cells.append(f"{estimates[0]:.5f}" if estimates else "")
        rows.row(f"{key} {part}", *cells)
    print_table(rows)


COMMANDS = {
    "divergence": Command(parity_divergence, _show, _mapping),
    "tasks": Command(parity_tasks, _show_tasks, _mapping),
    "run-tasks": Command(parity_run_tasks, _show_items, _items),
    "sampled": Command(parity_sampled, _show, _mapping),
    "draft": Command(parity_draft, _show_draft, _mapping),
}
