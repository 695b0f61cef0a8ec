"""A run of MLflow, which is imported when one is logged."""

import contextlib
import importlib.util
import io
import os
import time

from ..errors import TrackingError
from .tracked_run import TrackedRun

_EXPERIMENT = "draftquant"
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
_LONGEST_TAG = 5000  # characters; MLflow 3.17 takes 8000
_MOST_METRICS = 1000  # in one request


def check_mlflow(uri: str | None) -> None:
    """Check, before any work, that MLflow can open its database: `mlflow-skinny` can open none.

    Raises:
        TrackingError: a database is meant, and the package that opens it is not installed.
    """
    if importlib.util.find_spec("sqlalchemy") is not None:
        return
    if uri is None:
        from mlflow import get_tracking_uri

        uri = get_tracking_uri()
    scheme = uri.partition(":")[0].partition("+")[0]
    if scheme in _DATABASES:
        raise TrackingError(
            "--log-to mlflow",
            f"a {scheme} database needs the full package mlflow, and only mlflow-skinny is"
            " installed",
            fix="pip install mlflow, or log to a server: --log-to mlflow:http://HOST:5000",
        )


def log_to_mlflow(run: TrackedRun, uri: str | None) -> str:
    """Log a run, into the experiment of MLFLOW_EXPERIMENT_NAME, or `draftquant`.

    Args:
        run: what is logged.
        uri: of the tracking server; None = MLFLOW_TRACKING_URI, or what MLflow takes by default.

    Returns:
        The run's id.

    Raises:
        Exception: whatever MLflow raises.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client, now = MlflowClient(tracking_uri=uri), int(time.time() * 1000)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name)
    reason = run.reason[:_LONGEST_TAG]
    tags = {"verdict": run.verdict, "reason": reason, "mlflow.note.content": reason}
    run_id: str = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
    client.log_batch(run_id, params=[Param(key, value) for key, value in run.params.items()])
    metrics = [Metric(key, value, now, 0) for key, value in run.metrics.items()]
    for first in range(0, len(metrics), _MOST_METRICS):
        client.log_batch(run_id, metrics=metrics[first : first + _MOST_METRICS])
    for file in run.files:
        client.log_artifact(run_id, str(file))
    with contextlib.redirect_stdout(io.StringIO()):  # an address; stdout is for results
        client.set_terminated(run_id)
    return run_id
