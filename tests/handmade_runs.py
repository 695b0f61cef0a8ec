"""Measurements made by hand: token ids in, and everything else alike unless told."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from draftquant.calibration.traces.prompt_trace import prompt_sha256
from draftquant.validate.measure.measurement import (
    Measurement,
    RequestRecord,
    Speculation,
    prompts_sha256,
)
from handmade_measurements import setup

SPECULATION = Speculation(num_draft_tokens=3, method="eagle3")


def record(i: int, token_ids: Sequence[int], **changes: Any) -> RequestRecord:
    """Prompt `p{i}` of tokens [i], with its output."""
    made = RequestRecord(
        id=f"p{i}",
        category="ab"[i % 2],
        prompt_sha256=prompt_sha256([i]),
        num_prompt_tokens=1,
        token_ids=tuple(token_ids),
        ended="length",
        began=0.0,
        time_to_first_token=0.01,
        latency=0.1,
    )
    return dataclasses.replace(made, **changes)


def run(
    records: Sequence[RequestRecord],
    *,
    name: str = "run",
    speculation: Speculation | None = None,
    **changes: Any,
) -> Measurement:
    """A run of these records; `changes` as of `handmade_measurements.setup`."""
    digest = prompts_sha256((r.id, r.category, r.prompt_sha256) for r in records)
    asked = {"prompts_sha256": digest, "max_new_tokens": 8, "concurrency": 4}
    made = dataclasses.replace(setup(**asked | changes), speculation=speculation)
    return Measurement(name=name, setup=made, records=tuple(records))
