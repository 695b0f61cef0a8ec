"""A run of Weights & Biases, whose package is imported when one is logged."""

import os

from .tracked_run import TrackedRun

_PROJECT = "draftquant"


def log_to_wandb(run: TrackedRun, project: str | None) -> str:
    """Log a run; WANDB_MODE=offline keeps it in the folder `wandb`.

    Args:
        run: what is logged.
        project: its name; None = WANDB_PROJECT, or `draftquant`.

    Returns:
        The run's address, or where it lies.

    Raises:
        Exception: whatever wandb raises.
    """
    import wandb

    # Nothing but what is given goes out: neither the console, nor code, nor what git knows.
    settings = wandb.Settings(silent=True, console="off", save_code=False, disable_git=True)
    with wandb.init(
        project=project or os.environ.get("WANDB_PROJECT") or _PROJECT,
        name=run.name,
        job_type="gate",
        tags=[run.verdict],
        notes=run.reason,
        config=dict(run.params),
        settings=settings,
    ) as live:
        live.summary.update({**run.metrics, "verdict": run.verdict})
        report = wandb.Artifact(f"gate-report-{live.id}", type="gate-report")
        for file in run.files:
            report.add_file(str(file))
        live.log_artifact(report)
        return str(live.url or live.dir)
