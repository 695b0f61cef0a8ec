"""`parity_tasks`: scores that lm_eval gave the same items of two servers."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from . import reports
from .arguments import AnyPath, share
from .findings import BoundedFindings
from .option import Argument, Option
from .verb import verb

_DIRECTION = "of metrics whose direction neither lm_eval's results nor their name says"


@dataclass(frozen=True, slots=True)
class TasksSettings(BoundedFindings):
    """Of which samples, and what drop is too much."""

    first: Annotated[
        AnyPath,
        Argument(
            "samples of the reference server: a folder of lm_eval's --log_samples, or"
            " one of its files",
            "A_SAMPLES",
        ),
    ]
    second: Annotated[AnyPath, Argument("samples of the other server", "B_SAMPLES")]
    _: KW_ONLY
    max_score_drop: Annotated[
        float | None,
        Option(
            "largest tolerated drop of the score, in the metric's own unit, such as "
            "0.01 or 1%% for accuracy",
            "MARGIN",
            reads=share,
        ),
    ] = None
    higher_is_better: Annotated[Sequence[str], Option(_DIRECTION, "METRIC")] = ()
    lower_is_better: Annotated[Sequence[str], Option(_DIRECTION, "METRIC")] = ()


@verb(TasksSettings)
def parity_tasks(settings: TasksSettings) -> "reports.Findings":
    """Compare the scores that two servers got for the same items of lm_eval.

    Returns:
        One finding for each metric of each task.

    Raises:
        DraftQuantError: the samples cannot be read, or do not hold the same items.
    """
    from ...validate.parity.lm_eval_samples import read_samples
    from ...validate.parity.metric_directions import Directions
    from ...validate.parity.task_findings import task_findings

    findings = task_findings(
        read_samples(Path(settings.first)),
        read_samples(Path(settings.second)),
        max_score_drop=settings.max_score_drop,
        confidence=settings.confidence,
        directions=Directions(higher=settings.higher_is_better, lower=settings.lower_is_better),
    )
    return settings.write(findings)
