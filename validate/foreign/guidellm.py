"""GuideLLM: its report as JSON, whose requests keep what the server reported of them.

Source: GuideLLM 0.8.1, `benchmark/schemas/report.py` (`GenerativeBenchmarksReport`, version 2) and
`schemas/base/request_stats.py` (`GenerativeRequestStats`): `response_metrics` is vLLM's `metrics`
as received, `request_args` the request as it was sent.
"""

from collections.abc import Mapping
from pathlib import Path

from ...recipes.errors import MeasureError, short
from ...recipes.strict_json import parse_object
from ..measure.answer_fields import AnswerProblem, Fields, number, object_, objects, whole
from .foreign_measurement import (
    PAGE,
    ForeignMeasurement,
    ForeignRequest,
    asked,
    object_in,
    optional,
    reading,
    string,
    vllm_verify_steps,
    with_k,
)

_METRICS = (
    "use GuideLLM 0.8 or later with --backend kind=openai_http, start vLLM with"
    " --per-request-spec-decode-metrics summary (or detailed), and measure again"
)


def claims(first: object) -> bool:
    """Whether a document is such a report."""
    if not isinstance(first, Mapping) or not isinstance(first.get("metadata"), Mapping):
        return False
    return "guidellm_version" in first["metadata"] and "benchmarks" in first


def read(path: Path) -> ForeignMeasurement:
    """The one benchmark of a report.

    Raises:
        MeasureError: it holds several, sampled its requests, or they have no verify steps.
    """
    report = object_in(path)
    with reading(str(path)):
        benchmarks = objects(report, "benchmarks")
        if len(benchmarks) != 1:
            raise MeasureError(
                path,
                f"expected one benchmark, got {len(benchmarks)}",
                fix="run one strategy: --profile kind=concurrent,streams=8, no sweep",
            )
        requests = object_(benchmarks[0], "requests")
        for kind in ("errored", "incomplete"):
            if count := len(objects({kind: [], **requests}, kind)):
                raise MeasureError(
                    path,
                    f"{count} requests are {kind}: both runs need the verify steps of every prompt",
                    fix="end the run by --constraint kind=max_requests, and measure again",
                )
        metadata = object_(report, "metadata")
        version = string(metadata, "guidellm_version")
        found = objects(requests, "successful")
    places = sorted(range(len(found)), key=lambda i: _began(found[i], f"{path}: {_PLACE}[{i}]"))
    told = []
    for place in places:
        with reading(f"{path}: {_PLACE}[{place}]", _METRICS):
            told.append(_request(found[place]))
    most, counted = with_k(path, told)
    return ForeignMeasurement(
        name=path.name,
        tool=f"GuideLLM {version}",
        engine="vllm",
        model=_model(report),
        num_draft_tokens=most,
        paired_by="the prompt as it was sent",
        to_keep_outputs="guidellm run without --metrics that sample requests",
        requests=counted,
    )


_PLACE = "benchmarks[0].requests.successful"


def _request(stats: Fields) -> tuple[ForeignRequest, int]:
    if not isinstance(stats.get("response_metrics"), Mapping):
        raise AnswerProblem(
            "response_metrics: expected the metrics that vLLM reports of each request, got"
            f" {short(stats.get('response_metrics'))}"
        )
    most, histogram = vllm_verify_steps(object_(stats["response_metrics"], "speculative_decoding"))
    sent = asked(_body(stats))
    if sent is None:
        raise AnswerProblem("request_args: expected a body with a prompt or messages")
    digest, settings = sent
    request = ForeignRequest(
        id=digest[:12],
        prompt_sha256=digest,
        settings=settings,
        num_output_tokens=optional(object_(stats, "output_metrics"), "total_tokens", whole),
        output=optional(stats, "output", string),
        histogram=histogram,
    )
    return request, most


def _body(stats: Fields) -> Fields:
    return object_(parse_object(string(stats, "request_args")), "body")


def _began(stats: Fields, where: str) -> float:
    """Requests stand in the order in which they ended."""
    with reading(where, PAGE):
        return number(stats.get("request_start_time"), "request_start_time")


def _model(report: Fields) -> str:
    config = report.get("config")
    spec = config.get("spec") if isinstance(config, Mapping) else None
    backend = spec.get("backend") if isinstance(spec, Mapping) else None
    return str(backend.get("model") or "") if isinstance(backend, Mapping) else ""
