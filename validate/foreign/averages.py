"""Results that hold averages alone: recognized, so that the refusal says what to switch on.

Of an average nobody can say how sure it is: a mean acceptance length of 2.8 and one of 2.77 may be
the same draft on two days, or a loss of 1 %.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MeasureError

_MEASURE = "or measure with 'draftquant measure', which keeps the verify steps of every request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """One kind of result.

    Attributes:
        tool: and which of its files; source: where its shape stands.
        claims: whether a document, or a first line, is one.
        holds: what it has instead of verify steps of requests.
        switch_on: by what the tool, or its server, keeps them; a sentence's beginning.
    """

    tool: str
    source: str
    claims: Callable[[Mapping[str, Any]], bool]
    holds: str
    switch_on: str


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda document: all(key in document for key in keys)


AVERAGES: tuple[Average, ...] = (
    Average(
        tool="SGLang bench_serving",
        source="SGLang 0.5.23, benchmark/serving.py",
        claims=_has("accept_length", "backend", "random_range_ratio"),
        holds="accept_length, the average of the server since it was started",
        switch_on="start SGLang with --export-metrics-to-file --export-metrics-to-file-dir DIR, run"
        " bench_serving with --return-logprob, and give the file in DIR",
    ),
    Average(
        tool="SGLang bench_one_batch_server",
        source="SGLang 0.5.23, benchmark/one_batch_server.py",
        claims=_has("acc_length", "last_gen_throughput"),
        holds="acc_length, the average of the server since it was started",
        switch_on="start SGLang with --export-metrics-to-file --export-metrics-to-file-dir DIR, and"
        " give the file in DIR",
    ),
    Average(
        tool="AIPerf (profile_export_aiperf.json)",
        source="AIPerf 0.13.0, exporters/metrics_json_exporter.py",
        claims=_has("aiperf_version", "input_config"),
        holds="averages and percentiles over requests",
        switch_on="give profile_export.jsonl beside it (aiperf profile --export-level raw), with"
        " vLLM started with --per-request-spec-decode-metrics detailed",
    ),
)


def refuse(path: Path, document: object) -> None:
    """Say of a result with averages alone what it lacks.

    Raises:
        MeasureError: it is one.
    """
    if not isinstance(document, Mapping):
        return
    for one in AVERAGES:
        if one.claims(document):
            raise MeasureError(
                path,
                f"is of {one.tool}, which holds {one.holds}: no verify steps of each prompt, so"
                " that a change has no bounds",
                fix=f"{one.switch_on}; {_MEASURE}",
            )
