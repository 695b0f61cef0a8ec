"""AIPerf and GuideLLM: benchmarks that keep what a server reported for each request.

Source: AIPerf 0.13.0, `common/models/spec_decode_models.py` and `record_models.py`, of 0.14 its
documentation; GuideLLM 0.8.1, `benchmark/schemas/report.py` (version 2) and
`schemas/base/request_stats.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...recipes.errors import MeasureError, short
from ...recipes.strict_json import parse_json, parse_object
from ..measure.server_answers import (
    AnswerProblem,
    Fields,
    checked_draft_tokens,
    number,
    object_,
    objects,
    optional,
    reading,
    section,
    string,
    text,
    whole,
)
from .foreign_measurement import (
    PAGE,
    ForeignMeasurement,
    ForeignRequest,
    asked,
    check_sums,
    constant_k,
    lines_of,
    object_in,
    sglang_verify_steps,
    vllm_verify_steps,
    with_k,
)

_RUN_AIPERF_RAW = "aiperf profile --export-level raw"
_RUN_AIPERF = (
    "start vLLM with --per-request-spec-decode-metrics summary (or detailed), or ask SGLang (0.5.19"
    f" or later) by {_RUN_AIPERF_RAW} --extra-inputs return_spec_tokens_details:true, and measure"
    " again; no release of TensorRT-LLM reports it"
)
_RUN_GUIDELLM = (
    "use GuideLLM 0.8 or later with --backend kind=openai_http, start vLLM with"
    " --per-request-spec-decode-metrics summary (or detailed), and measure again"
)
"""How each tool is run so that its files hold what a verdict needs."""

_AS_SENT = "the prompt as it was sent"
_PLACE = "benchmarks[0].requests.successful"

Sent = tuple[str, Mapping[str, object]]
"""Identity of a prompt, and the settings of its request."""
Turn = tuple[str, int]
"""A session of AIPerf, and the number of a request in it."""


class RawAnswer(NamedTuple):
    """What a raw record holds of an answer: its text, and what SGLang counted."""

    text: str | None
    spec_tokens_details: Fields


NO_ANSWER = RawAnswer(None, {})


def read_aiperf(path: Path) -> ForeignMeasurement:
    """All records of the profiling phase; MeasureError: one failed, or has no verify steps.

    Beside them `inputs.json` has the requests, *_aiperf.json the version, and *_raw.jsonl, which
    `--export-level raw` writes, the answers: those of SGLang have the verify steps that AIPerf 0.13
    reads of vLLM only. The category is the record's (0.14), or that of SPEED-Bench's file.
    """
    stem = path.name.removesuffix(".jsonl")
    beside = path.with_name(f"{stem}_aiperf.json")
    summary = object_in(beside) if beside.exists() else {}
    answers, payloads = _raw(path.with_name(f"{stem}_raw.jsonl"))
    sent = payloads or _inputs(path.with_name("inputs.json"))
    categories = _categories(summary, path.parent)
    told, engine = [], ""
    for where, line in lines_of(path):
        with reading(where, _RUN_AIPERF):
            meta = object_(line, "metadata")
            if meta.get("benchmark_phase") == "warmup":
                continue
            if line.get("error") is not None:
                raise AnswerProblem(f"error: the request failed: {short(line['error'])}")
            if meta.get("was_cancelled"):
                raise AnswerProblem("was_cancelled: the request was cancelled, its output is cut")
            turn, answer = _turn(meta), answers.get(text(meta, "x_request_id"), NO_ANSWER)
            if turn not in sent:
                raise AnswerProblem(f"metadata: no request of session {turn[0]!r} is known")
            engine, most, counted = _verify_steps(line, answer)
            request = _request(
                sent[turn],
                category=optional(meta, "source_kind", text) or categories.get(turn[0], "all"),
                output=answer.text,
                **counted,
            )
            told.append((request, most))
    most, requests = with_k(path, told)
    models = section(summary, "input_config", "models").get("items")
    known = models if isinstance(models, list) else []
    names = [model.get("name") for model in known if isinstance(model, Mapping)]
    usual = path.name == "profile_export.jsonl"
    return ForeignMeasurement(
        name=f"{path.parent.name}/{path.name}" if usual else path.name,
        tool=f"AIPerf {summary.get('aiperf_version') or ''}".strip(),
        engine=engine,
        model=", ".join(str(name) for name in names if name),
        num_draft_tokens=most,
        paired_by=_AS_SENT,
        to_keep_outputs=_RUN_AIPERF_RAW,
        requests=requests,
    )


def read_guidellm(path: Path) -> ForeignMeasurement:
    """The one benchmark of a report; MeasureError: it sampled its requests, or lacks some."""
    report = object_in(path)
    with reading(str(path), PAGE):
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
        version = string(object_(report, "metadata"), "guidellm_version")
        records = objects(requests, "successful")
    places = sorted(range(len(records)), key=lambda i: _began(records[i], f"{path}: {_PLACE}[{i}]"))
    told = []
    for place in places:
        with reading(f"{path}: {_PLACE}[{place}]", _RUN_GUIDELLM):
            told.append(_of_stats(records[place]))
    most, counted = with_k(path, told)
    return ForeignMeasurement(
        name=path.name,
        tool=f"GuideLLM {version}",
        engine="vllm",
        model=str(section(report, "config", "spec", "backend").get("model") or ""),
        num_draft_tokens=most,
        paired_by=_AS_SENT,
        to_keep_outputs="guidellm run without --metrics that sample requests",
        requests=counted,
    )


def _request(sent: Sent, **counted: Any) -> ForeignRequest:
    digest, settings = sent
    return ForeignRequest(id=digest[:12], prompt_sha256=digest, settings=settings, **counted)


def _verify_steps(line: Fields, answer: RawAnswer) -> tuple[str, int, Mapping[str, Any]]:
    """The engine, K, and the counts of a request."""
    if line.get("spec_decode_acceptance") is None and answer.spec_tokens_details:
        usage = object_(object_(line, "metrics"), "usage_completion_tokens")
        most, histogram = sglang_verify_steps(answer.spec_tokens_details, whole(usage, "value"))
        return "sglang", most, {"num_output_tokens": usage["value"], "histogram": histogram}
    told = object_(line, "spec_decode_acceptance")
    known = optional(told, "num_spec_tokens", whole)
    most = known or constant_k(told, "num_draft_tokens", "num_spec_steps")
    return (
        text(told, "engine"),
        checked_draft_tokens(most, "num_spec_tokens"),
        {
            "num_output_tokens": optional(told, "completion_tokens", whole),
            "histogram": _histogram(told, most),
        },
    )


def _categories(summary: Fields, folder: Path) -> Mapping[str, str]:
    """Those of SPEED-Bench's file by conversation, where it still lies, or beside the records."""
    config = section(summary, "input_config")
    for dataset in objects({"datasets": [], **config}, "datasets"):
        given = Path(optional(dataset, "path", text) or "")
        if "speed_bench" in str(dataset.get("format")):
            for place in filter(Path.is_file, (folder / given.name, given)):
                rows = [row for _, row in lines_of(place)]
                return {text(row, "question_id"): text(row, "category") for row in rows}
    return {}


def _histogram(told: Fields, most: int) -> tuple[int, ...]:
    """AIPerf writes the columns that are not 0, with their numbers as text."""
    recorded = object_(told, "acceptance_histogram")
    columns = [str(j) for j in range(most + 1)]
    if unknown := [key for key in recorded if key not in columns]:
        raise AnswerProblem(
            f"acceptance_histogram: expected keys 0 to {most} for num_spec_tokens = {most}, got"
            f" {short(unknown)}"
        )
    histogram = tuple(whole({**dict.fromkeys(columns, 0), **recorded}, key) for key in columns)
    check_sums(told, histogram)
    return histogram


def _sent(payload: Fields) -> Sent:
    expected = "payload: expected a prompt or messages"
    return asked(payload, f"{expected}, got {short(sorted(payload))}")


def _turn(meta: Fields) -> Turn:
    return text(meta, "conversation_id"), optional(meta, "turn_index", whole) or 0


def _inputs(path: Path) -> dict[Turn, Sent]:
    with reading(str(path), f"keep inputs.json beside the records, or use {_RUN_AIPERF_RAW}"):
        if not path.exists():
            raise AnswerProblem("expected the requests of the run, got no such file")
        return {
            (text(session, "session_id"), turn): _sent(payload)
            for session in objects(object_in(path), "data")
            for turn, payload in enumerate(objects(session, "payloads"))
        }


def _raw(path: Path) -> tuple[dict[str, RawAnswer], dict[Turn, Sent]]:
    answers: dict[str, RawAnswer] = {}
    sent: dict[Turn, Sent] = {}
    for where, line in lines_of(path) if path.exists() else ():
        with reading(where, PAGE):
            meta = object_(line, "metadata")
            sent[_turn(meta)] = _sent(object_(line, "payload"))
            events = [event for one in objects(line, "responses") for event in _events(one)]
            told = [section(event, "sglext").get("spec_tokens_details") for event in events]
            answers[text(meta, "x_request_id")] = RawAnswer(
                "".join(map(_choice, events)),
                next((details for details in told if isinstance(details, Mapping)), {}),
            )
    return answers, sent


def _events(response: Fields) -> list[Fields]:
    values = [string(packet, "value") for packet in objects({"packets": [], **response}, "packets")
            if packet.get("name") == "data"]  # fmt: skip
    if isinstance(response.get("text"), str):
        values = [response["text"]]
    parsed = (parse_json(value) for value in values if value != "[DONE]")
    return [event for event in parsed if isinstance(event, Mapping)]


def _choice(answer: Fields) -> str:
    if not answer.get("choices"):
        return ""
    choice = objects(answer, "choices")[0]
    key = next((key for key in ("delta", "message") if choice.get(key)), None)
    content = choice.get("text") if key is None else object_(choice, key).get("content")
    return str(content or "")


def _of_stats(stats: Fields) -> tuple[ForeignRequest, int]:
    if not isinstance(stats.get("response_metrics"), Mapping):
        raise AnswerProblem(
            "response_metrics: expected the metrics that vLLM reports of each request, got"
            f" {short(stats.get('response_metrics'))}"
        )
    most, histogram = vllm_verify_steps(object_(stats["response_metrics"], "speculative_decoding"))
    body = object_(parse_object(string(stats, "request_args")), "body")
    sent = asked(body, "request_args: expected a body with a prompt or messages")
    request = _request(
        sent,
        num_output_tokens=optional(object_(stats, "output_metrics"), "total_tokens", whole),
        output=optional(stats, "output", string),
        histogram=histogram,
    )
    return request, most


def _began(stats: Fields, where: str) -> float:
    """Requests are in the order in which they ended."""
    with reading(where, PAGE):
        return number(stats.get("request_start_time"), "request_start_time")
