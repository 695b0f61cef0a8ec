"""SGLang: its own record of every request, `sglang-request-metrics-*.log`.

Source: SGLang 0.5.23, `srt/observability/request_metrics_exporter.py` (a line of JSON for each
request: `request_parameters`, as JSON in a string, and the answer's `meta_info`), and
`srt/managers/tokenizer_manager.py`, `_calculate_spec_decoding_metrics`. Output tokens are there
where the request asked for log-probabilities.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

from ...recipes.errors import short
from ...recipes.strict_json import parse_object
from ..errors import MeasureError
from ..measure.protocols.answer_fields import (
    AnswerProblem,
    Fields,
    checked_draft_tokens,
    text,
    whole,
    wholes,
)
from .foreign_files import lines_of, optional, reading, string
from .foreign_measurement import ForeignMeasurement, ForeignRequest, sha256_of

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
    sizes = {most for _, most in told if most}
    if len(sizes) != 1:
        raise MeasureError(path, f"expected one K in all requests, got {sorted(sizes)}",
                           fix="keep the records of one server with one K in one file")  # fmt: skip
    most = sizes.pop()
    requests = []
    for place, (request, _) in enumerate(told):
        counts = request.histogram
        if len(counts) > most + 1:
            what = f"request {place}: {len(counts)} counts, expected {most + 1} for K = {most}"
            raise MeasureError(path, what, fix=_METRICS)
        whole_counts = (*counts, *(0,) * (most + 1 - len(counts)))
        requests.append(dataclasses.replace(request, histogram=whole_counts))
    return ForeignMeasurement(
        name=path.name,
        tool="request metrics of SGLang",
        engine="sglang",
        num_draft_tokens=most,
        paired_by="the prompt as it was sent",
        to_keep_outputs="ask with return_logprob: true (bench_serving --return-logprob)",
        requests=tuple(requests),
    )


def _told(where: str, line: Fields) -> tuple[ForeignRequest, int]:
    """A request, its histogram up to the largest number seen, and K; 0 = it has no verify step."""
    with reading(where, _METRICS):
        asked = parse_object(string(line, "request_parameters"))
        prompt = {key: asked[key] for key in ("text", "input_ids") if asked.get(key) is not None}
        if not prompt:
            raise AnswerProblem("request_parameters: expected text or input_ids, got neither")
        if _is_aborted(line.get("finish_reason")):
            raise AnswerProblem(
                f"finish_reason: the request failed: {short(line['finish_reason'])}"
            )
        digest = sha256_of(prompt)
        num_tokens = whole(line, "completion_tokens")
        histogram, most = _histogram(line, num_tokens)
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


def _is_aborted(finish_reason: object) -> bool:
    return isinstance(finish_reason, Mapping) and finish_reason.get("type") == "abort"


def _histogram(line: Fields, num_tokens: int) -> tuple[tuple[int, ...], int]:
    if num_tokens <= 1 and "spec_verify_ct" not in line:
        return (0,), 0
    steps = whole(line, "spec_verify_ct", least=1)
    counts = wholes(line, "spec_correct_drafts_histogram")
    proposed = whole(line, "spec_num_proposed_drafts", least=1)
    sums = {
        "spec_verify_ct": sum(counts),
        "spec_num_correct_drafts": sum(j * count for j, count in enumerate(counts)),
    }
    for key, value in sums.items():
        if whole(line, key) != value:
            raise AnswerProblem(
                f"{key}: expected {value} by spec_correct_drafts_histogram, got {line[key]}"
            )
    if proposed % steps:
        raise AnswerProblem(
            f"spec_num_proposed_drafts: {proposed} of {steps} verify steps: K changes, which no"
            " verdict compares (--speculative-adaptive)"
        )
    return counts, checked_draft_tokens(proposed // steps, "spec_num_proposed_drafts")


def _output(line: Fields) -> str | None:
    """[log-probability, token id, text] of each token, as text that tells tokens apart."""
    entries = line.get("output_token_logprobs")
    if not isinstance(entries, list):
        return None
    ids = [list(itertools.islice(one, 1, 2)) if isinstance(one, list) else [] for one in entries]
    if not all(len(one) == 1 and type(one[0]) is int for one in ids):
        raise AnswerProblem(f"output_token_logprobs: expected triples, got {short(entries)}")
    return " ".join(str(one[0]) for one in ids)
