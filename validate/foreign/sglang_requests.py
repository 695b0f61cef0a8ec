"""SGLang: its own record of every request, `sglang-request-metrics-*.log`.

Source: SGLang 0.5.23, `srt/observability/request_metrics_exporter.py` (a line of JSON for each
request: `request_parameters`, as JSON in a string, and the answer's `meta_info`). Output tokens are
there where the request asked for log-probabilities.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path

from ...recipes.errors import short
from ...recipes.strict_json import parse_object
from ..measure.answer_fields import AnswerProblem, Fields, text, whole
from .foreign_measurement import (
    ForeignMeasurement,
    ForeignRequest,
    check_finished,
    lines_of,
    optional,
    reading,
    sglang_verify_steps,
    sha256_of,
    string,
    with_k,
)

_METRICS = (
    "start SGLang 0.5.10 or later with --export-metrics-to-file --export-metrics-to-file-dir DIR,"
    " without --log-requests (which cuts prompts), and --speculative-eagle-topk 1"
)


def claims(first: object) -> bool:
    """Whether a first line is such a record."""
    return isinstance(first, Mapping) and {"request_parameters", "prompt_tokens"} <= first.keys()


def read(path: Path) -> ForeignMeasurement:
    """All requests of one file.

    Raises:
        MeasureError: a record is none, has no verify steps, or does not say its prompt.
    """
    told = [_told(where, line) for where, line in lines_of(path)]
    most, requests = with_k(path, told)
    return ForeignMeasurement(
        name=path.name,
        tool="request metrics of SGLang",
        engine="sglang",
        num_draft_tokens=most,
        paired_by="the prompt as it was sent",
        to_keep_outputs="ask with return_logprob: true (bench_serving --return-logprob)",
        requests=requests,
    )


def _told(where: str, line: Fields) -> tuple[ForeignRequest, int]:
    """A request, its histogram up to the largest number seen, and K; 0 = it has no verify step."""
    with reading(where, _METRICS):
        asked = parse_object(string(line, "request_parameters"))
        prompt = {key: asked[key] for key in ("text", "input_ids") if asked.get(key) is not None}
        if not prompt:
            raise AnswerProblem("request_parameters: expected text or input_ids, got neither")
        check_finished(line.get("finish_reason"))
        digest = sha256_of(prompt)
        num_tokens = whole(line, "completion_tokens")
        most, histogram = sglang_verify_steps(line, num_tokens)
        sampling = asked.get("sampling_params")
        request = ForeignRequest(
            id=optional(line, "id", text) or digest[:12],
            prompt_sha256=digest,
            settings=sampling if isinstance(sampling, Mapping) else {},
            num_output_tokens=num_tokens,
            output=_output(line),
            histogram=histogram,
        )
        return request, most


def _output(line: Fields) -> str | None:
    """[log-probability, token id, text] of each token, as text that tells tokens apart."""
    entries = line.get("output_token_logprobs")
    if not isinstance(entries, list):
        return None
    ids = [list(itertools.islice(one, 1, 2)) if isinstance(one, list) else [] for one in entries]
    if not all(len(one) == 1 and type(one[0]) is int for one in ids):
        raise AnswerProblem(f"output_token_logprobs: expected triples, got {short(entries)}")
    return " ".join(str(one[0]) for one in ids)
