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


def _show_tasks(found: "Findings", _settings: object) -> None:
    for one in found.findings:
        _print_scores(one)
    _show(found, _settings)


def _show_draft(found: "Findings", _settings: object) -> None:
    _print_parts(found.findings)
    _show(found, _settings)


Samples = Mapping[str, "reports.TaskSamples"]


def _items(samples: Samples, _settings: object) -> dict[str, Any]:
    return {
        task: {
            "samples": str(one.path),
            "items": {name: len(items) for name, items in one.items.items()},
        }
        for task, one in samples.items()
    }


def _show_items(samples: Samples, _settings: object) -> None:
    for task, one in samples.items():
        counts = ", ".join(f"{len(items):,} ({name})" for name, items in one.items.items())
        stdout().line((task, "bold"), f": items {counts}: {one.path}")


def _mapping(found: "Findings", _settings: object) -> Any:
    from ...validate.parity.finding import to_mapping

    return to_mapping(found.findings)


def _show(found: "Findings", _settings: object) -> None:
    numbers = ("figure", "lower bound", "upper bound", "threshold")
    rows = table("Parity", "check", "of", *numbers, "verdict", right=numbers)
    for one in found.findings:
        figures = (one.estimate, one.lower, one.upper, one.threshold)
        cells = ("" if figure is None else f"{figure:.4g}" for figure in figures)
        rows.row(one.check, one.what, *cells, one.verdict, style=COLOURS[one.verdict])
    print_table(rows)
    for one in found.findings:
        stdout().line((one.verdict, f"bold {COLOURS[one.verdict]}"), f": {one.what}: {one.reason}")


def _print_scores(one: "ParityFinding") -> None:
    found = one.details[0]
    counts = ""
    if "mcnemar_p" in found:
        counts = (
            f"; only A right {found['only_first_right']}, only B right"
            f" {found['only_second_right']}, McNemar p = {found['mcnemar_p']:.3f}"
        )
    stdout().line(
        f"{one.what}: A {found['first']:.4f}, B {found['second']:.4f}"
        f" over {found['items']:,} items{counts}"
    )


def _print_parts(findings: "Sequence[ParityFinding]") -> None:
    figures = [one.what for one in findings]
    found = table("By step and category", "of", *figures, right=(*figures,))
    parts = [(key, row[key]) for key in ("step", "category") for row in findings[0].details
             if key in row]  # fmt: skip
    for key, part in parts:
        cells = []
        for one in findings:
            own = [row["estimate"] for row in one.details if row.get(key) == part]
            cells.append(f"{own[0]:.5f}" if own else "")
        found.row(f"{key} {part}", *cells)
    print_table(found)


COMMANDS = {
    "divergence": Command(parity_divergence, _show, _mapping),
    "tasks": Command(parity_tasks, _show_tasks, _mapping),
    "run-tasks": Command(parity_run_tasks, _show_items, _items),
    "sampled": Command(parity_sampled, _show, _mapping),
    "draft": Command(parity_draft, _show_draft, _mapping),
}
