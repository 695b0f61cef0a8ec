"""Recording as tests ask for it: what is recorded and how it runs, in one call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording import record_traces as product
from draftquant.calibration.recording.target_model import configured_shape
from draftquant.calibration.recording.target_shape import RecordingPlan
from draftquant.calibration.traces.trace_folder import TraceFolder

OF_THE_RUN = ("fixed_batches", "placement", "elsewhere", "on_progress", "on_note")


def record_traces(
    target: Path, prompts: Sequence[Prompt], out: Path, *, max_new_tokens: int, **asked: Any
) -> TraceFolder:
    """`record_traces` of a plan with the sizes that transformers reads."""
    how = {name: asked.pop(name) for name in OF_THE_RUN if name in asked}
    asked |= {"max_new_tokens": max_new_tokens}
    return product.record_traces(plan_of(target, prompts, **asked), out, **how)


def plan_of(target: Path, prompts: Sequence[Prompt], **asked: Any) -> RecordingPlan:
    return RecordingPlan(target=target, shape=configured_shape(target), prompts=prompts, **asked)
