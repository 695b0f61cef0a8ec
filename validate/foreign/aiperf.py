"""AIPerf: records of requests (`profile_export.jsonl`), and what lies beside them.

Source: AIPerf 0.13.0, `common/models/spec_decode_models.py` (`SpecDecodeAcceptanceRecord`),
`common/models/record_models.py` (`MetricRecordInfo`) and `post_processors`. The records have the
verify steps; `inputs.json` has the requests, `profile_export_aiperf.json` the version, and
`profile_export_raw.jsonl`, which `--export-level raw` writes, the answers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...recipes.errors import short
from ...recipes.strict_json import parse_json
from ..measure.answer_fields import (
    AnswerProblem,
    Fields,
    checked_draft_tokens,
    object_,
    objects,
    text,
    whole,
)
from .foreign_measurement import (
    ForeignMeasurement,
    ForeignRequest,
    asked,
    check_sums,
    lines_of,
    object_in,
    optional,
    reading,
    string,
    with_k,
)

_METRICS = (
    "start vLLM with --per-request-spec-decode-metrics summary (or detailed) and measure again;"
    " AIPerf 0.13 reads no other engine's"
)
_RAW = "aiperf profile --export-level raw"


def claims(first: object) -> bool:
    """Whether a first line is such a record."""
    return isinstance(first, Mapping) and {"metadata", "metrics"} <= first.keys() and (
        isinstance(first["metadata"], Mapping) and "session_num" in first["metadata"]
    )  # fmt: skip


def read(path: Path) -> ForeignMeasurement:
    """All records of the profiling phase.

    Raises:
        MeasureError: a record is none, failed, or has no verify steps; or no request is named.
    """
    stem = path.name.removesuffix(".jsonl")
    summary = _beside(path, f"{stem}_aiperf.json")
    outputs, payloads = _raw(path.with_name(f"{stem}_raw.jsonl"))
    sent = payloads or _inputs(path.with_name("inputs.json"))
    told, engine = [], ""
    for where, line in lines_of(path):
        with reading(where, _METRICS):
            meta = object_(line, "metadata")
            if meta.get("benchmark_phase") == "warmup":
                continue
            if line.get("error") is not None:
                raise AnswerProblem(f"error: the request failed: {short(line['error'])}")
            if meta.get("was_cancelled"):
                raise AnswerProblem("was_cancelled: the request was cancelled, its output is cut")
            counts = object_(line, "spec_decode_acceptance")
            engine = text(counts, "engine")
            most = checked_draft_tokens(whole(counts, "num_spec_tokens"), "num_spec_tokens")
            key = _key(meta)
            if key not in sent:
                raise AnswerProblem(f"metadata: no request of session {key[0]!r} is known")
            request_id = text(meta, "x_request_id")
            digest, settings = sent[key]
            request = ForeignRequest(
                id=digest[:12],
                prompt_sha256=digest,
                settings=settings,
                num_output_tokens=optional(counts, "completion_tokens", whole),
                output=outputs.get(request_id),
                histogram=_histogram(counts, most),
            )
            told.append((request, most))
    most, requests = with_k(path, told)
    return ForeignMeasurement(
        name=path.name
        if path.name != "profile_export.jsonl"
        else f"{path.parent.name}/{path.name}",
        tool=f"AIPerf {summary.get('aiperf_version') or ''}".strip(),
        engine=engine,
        model=_model(summary),
        num_draft_tokens=most,
        paired_by="the prompt as it was sent",
        to_keep_outputs=_RAW,
        requests=requests,
    )


def _histogram(told: Fields, most: int) -> tuple[int, ...]:
    """AIPerf writes the columns that are not 0, by their number as text."""
    found = object_(told, "acceptance_histogram")
    columns = [str(j) for j in range(most + 1)]
    if unknown := [key for key in found if key not in columns]:
        raise AnswerProblem(
            f"acceptance_histogram: expected keys 0 to {most} for num_spec_tokens = {most}, got"
            f" {short(unknown)}"
        )
    histogram = tuple(whole({"0": 0, **found, key: found.get(key, 0)}, key) for key in columns)
    check_sums(told, histogram)
    return histogram


def _key(meta: Fields) -> tuple[str, int]:
    return text(meta, "conversation_id"), optional(meta, "turn_index", whole) or 0


Sent = dict[tuple[str, int], tuple[str, Mapping[str, object]]]


def _inputs(path: Path) -> Sent:
    """Every request by session and turn."""
    found: Sent = {}
    with reading(str(path), f"keep inputs.json beside the records, or use {_RAW}"):
        for session in objects(object_in(path), "data"):
            name = text(session, "session_id")
            for turn, payload in enumerate(objects(session, "payloads")):
                found[name, turn] = _asked(payload)
    return found


def _raw(path: Path) -> tuple[dict[str, str], Sent]:
    """Output texts by request, and every request; both empty where the file is not there."""
    outputs: dict[str, str] = {}
    sent: Sent = {}
    if not path.exists():
        return outputs, sent
    for where, line in lines_of(path):
        with reading(where):
            meta = object_(line, "metadata")
            sent[_key(meta)] = _asked(object_(line, "payload"))
            outputs[text(meta, "x_request_id")] = "".join(map(_text, objects(line, "responses")))
    return outputs, sent


def _text(response: Fields) -> str:
    """Of one event of a stream, or of a whole answer."""
    said = [string(packet, "value") for packet in objects({"packets": [], **response}, "packets")
            if packet.get("name") == "data"]  # fmt: skip
    if isinstance(response.get("text"), str):
        said = [response["text"]]
    return "".join(_choice(parse_json(value)) for value in said if value != "[DONE]")


def _choice(answer: Any) -> str:
    if not isinstance(answer, Mapping) or not answer.get("choices"):
        return ""
    choice = objects(answer, "choices")[0]
    key = next((key for key in ("delta", "message") if choice.get(key)), None)
    said = choice.get("text") if key is None else object_(choice, key).get("content")
    return str(said or "")


def _asked(payload: Fields) -> tuple[str, Mapping[str, object]]:
    found = asked(payload)
    if found is None:
        raise AnswerProblem(f"payload: expected a prompt or messages, got {short(sorted(payload))}")
    return found


def _beside(path: Path, name: str) -> Fields:
    beside = path.with_name(name)
    return object_in(beside) if beside.exists() else {}


def _model(summary: Fields) -> str:
    config = summary.get("input_config")
    models = config.get("models") if isinstance(config, Mapping) else None
    items = models.get("items") if isinstance(models, Mapping) else None
    known = items if isinstance(items, list) else []
    names = [one.get("name") for one in known if isinstance(one, Mapping)]
    return ", ".join(str(name) for name in names if name)
