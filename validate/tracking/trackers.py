"""Experiment trackers by what a user names: `mlflow`, `mlflow:URI`, `wandb`, `wandb:PROJECT`."""

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...recipes.errors import first_line, short
from ...recipes.install_line import install_line
from ..errors import TrackingError
from .mlflow_tracker import check_mlflow, log_to_mlflow
from .tracked_run import TrackedRun
from .wandb_tracker import log_to_wandb

_ACCOUNT = re.compile(r"//[^/@\s]+@")
"""Name and password in an address."""
_LOG: Mapping[str, Callable[[TrackedRun, str | None], str]] = {
    "mlflow": log_to_mlflow,
    "wandb": log_to_wandb,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracker:
    """Who is told, and where.

    Attributes:
        place: URI of MLflow, or project of Weights & Biases; None = as its environment says.
    """

    name: Literal["mlflow", "wandb"]
    place: str | None

    def log(self, run: TrackedRun) -> str:
        """Log a run, when everything else is done.

        Returns:
            Where it is.

        Raises:
            TrackingError: it could not be logged; the verdict is in the message, and on the disk.
        """
        try:
            return _LOG[self.name](run, self.place)
        except Exception as exc:  # whatever the tracker says is the answer
            first = _ACCOUNT.sub("//", first_line(exc))
            written = ", ".join(map(str, run.files))
            raise TrackingError(
                f"--log-to {self.name}",
                f"the verdict is {run.verdict}, and {written} is written; {self.name} did not take"
                f" the run: {first}",
                fix=f"mend that, then: draftquant report {run.files[0]} with the same --log-to",
            ) from exc


def find_tracker(asked: str) -> Tracker:
    """Read what a user asks for, before any work.

    Raises:
        TrackingError: no such tracker is known, or its package is not installed whole.
    """
    name, colon, place = asked.partition(":")
    if name not in _LOG or (colon and not place):
        raise TrackingError(
            "--log-to",
            f"expected mlflow, mlflow:URI, wandb or wandb:PROJECT, got {short(asked)}",
            fix="give one of them, such as mlflow:http://HOST:5000",
        )
    if importlib.util.find_spec(name) is None:
        raise TrackingError(
            f"--log-to {name}", "its package is not installed", fix=install_line(name)
        )
    if name == "mlflow":
        check_mlflow(place or None)
    return Tracker(name="mlflow" if name == "mlflow" else "wandb", place=place or None)
