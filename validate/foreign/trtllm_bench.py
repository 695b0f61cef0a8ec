"""trtllm-bench: `--request_json`, what it knows of each request, beside `--report_json`.

Source: NVIDIA/TensorRT-LLM at 2787769c, `tensorrt_llm/bench/dataclasses/reporting.py`
(`get_request_info`) and `statistics.py` (`RequestRecord`): `decode_iteration` counts the steps
behind prefill's, `num_total_output_tokens` (before: `num_output_tokens`) the tokens. K stands in
neither; `decoding_stats.num_draft_tokens_percentiles` of the report is K times the steps.
"""

from collections.abc import Mapping
from pathlib import Path

from ...recipes.errors import short
from ..errors import MeasureError
from ..measure.measurement import MOST_DRAFT_TOKENS
from ..measure.protocols.answer_fields import AnswerProblem, Fields, number, object_, objects, whole
from .foreign_files import object_in, optional, reading, string, whole_document
from .foreign_measurement import (
    ForeignMeasurement,
    ForeignRequest,
    narrowest,
    sha256_of,
    with_copies_together,
)

_BOTH = (
    "run trtllm-bench throughput (or latency) with --request_json NAME.json and --report_json"
    " NAME.report.json, both in one folder"
)


def claims(first: object) -> bool:
    """Whether a document is a list of such requests."""
    if not isinstance(first, list) or not first or not isinstance(first[0], Mapping):
        return False
    return {"decode_iteration", "num_input_tokens"} <= first[0].keys()


def read(path: Path) -> ForeignMeasurement:
    """All requests, in the order in which they were sent.

    Raises:
        MeasureError: a request is none or failed; or the report is not there, or has no K.
    """
    with reading(str(path), _BOTH):
        found = objects({"requests": whole_document(path)}, "requests")
        ids = [whole(one, "id") for one in found]
        if len(set(ids)) < len(ids):
            twice = next(one for one in ids if ids.count(one) > 1)
            raise AnswerProblem(f"id: expected another one for each request, got {twice} twice")
        places = sorted(range(len(found)), key=ids.__getitem__)
    report_path = path.with_name(f"{path.name.removesuffix('.json')}.report.json")
    if not report_path.exists():
        raise MeasureError(report_path, "is not there: K is known by it alone", fix=_BOTH)
    report = object_in(report_path)
    with reading(str(report_path), _BOTH):
        most = _num_draft_tokens(report, found)
        engine = object_(report, "engine")
        dataset = object_({"dataset": {}, **report}, "dataset")
    requests, lengths = [], []
    for order, place in enumerate(places):
        with reading(f"{path}: [{place}]", _BOTH):
            requests.append(_request(found[place], order, most))
            lengths.append(whole(found[place], "num_input_tokens"))
    return ForeignMeasurement(
        name=path.name,
        tool="trtllm-bench",
        engine="tensorrt-llm",
        version=str(engine.get("version") or ""),
        model=str(engine.get("model") or ""),
        num_draft_tokens=most,
        settings={f"dataset {key}": value for key, value in dataset.items()},
        paired_by="order in which they were sent, the prompt's length, and the text of the output",
        told_positions=False,
        to_keep_outputs="trtllm-bench always does",
        requests=with_copies_together(requests, lengths),
    )


def _num_draft_tokens(report: Fields, found: tuple[Fields, ...]) -> int:
    """K: the mean of the draft tokens of requests is K times the mean of their steps."""
    stats = object_(report, "decoding_stats")
    drafted = stats.get("num_draft_tokens_percentiles")
    if not isinstance(drafted, Mapping):
        raise AnswerProblem(
            "decoding_stats.num_draft_tokens_percentiles: expected the drafted tokens of a request,"
            f" got {short(drafted)}: the engine drafts nothing"
        )
    steps = sum(whole(one, "decode_iteration") + 1 for one in found)
    exact = number(drafted.get("average"), "average") * len(found) / steps
    most = round(min(max(exact, 1), MOST_DRAFT_TOKENS))
    if not 0.999 <= exact / most <= 1.001:
        raise AnswerProblem(
            f"num_draft_tokens_percentiles.average: K would be {exact:.3f}: the report is of"
            " another run"
        )
    return most


def _request(fields: Fields, order: int, most: int) -> ForeignRequest:
    if whole({"error_tokens": 0, **fields}, "error_tokens"):
        raise AnswerProblem(f"error_tokens: the request failed {fields['error_tokens']} times")
    newer = "num_total_output_tokens" in fields
    key = "num_total_output_tokens" if newer else "num_output_tokens"
    num_tokens = whole(fields, key, least=1)
    num_steps = whole(fields, "decode_iteration")
    accepted = num_tokens - 1 - num_steps
    if not 0 <= accepted <= most * num_steps:
        raise AnswerProblem(
            f"decode_iteration: {num_steps} verify steps of K = {most} cannot have written"
            f" {num_tokens} tokens"
        )
    return ForeignRequest(
        id=f"request {order}",
        category="all",
        prompt_sha256=sha256_of([order, whole(fields, "num_input_tokens")]),
        num_output_tokens=num_tokens,
        output=optional(fields, "output", string),
        histogram=narrowest(num_steps, accepted, most),
    )
