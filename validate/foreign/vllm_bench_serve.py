"""`vllm bench serve --save-result --save-detailed`: counted events, held against the counters.

The result has no verify steps of a request. But each event of a stream is one verify step, unless
the server sent two together, and `itls` has a time for every event behind the first. The counters
of the server, which the tool reads before and after, say how many verify steps there were in all:
if both sums are equal, no two came together and every request's own number is known.

Source: vLLM 0.32.0 and 0.33.0, `benchmarks/serve.py` (`benchmark`) and
`benchmarks/lib/endpoint_request_func.py`. Results stand in the order of the requests (they are
gathered), which a dataset, its seed and `--disable-shuffle` fix; prompts are not kept, so that the
lengths of prompts and the texts of outputs show that both runs asked the same.
"""

from collections.abc import Mapping
from pathlib import Path

from ...recipes.errors import short
from ..measure.answer_fields import AnswerProblem, Fields, whole, wholes
from .foreign_measurement import (
    ForeignMeasurement,
    ForeignRequest,
    narrowest,
    object_in,
    reading,
    sha256_of,
    string,
    with_copies_together,
)

_DETAILED = "run vllm bench serve with --save-result --save-detailed"
_TOLD = (
    "vllm bench serve keeps no verify steps of requests: with --max-concurrency 1 events come"
    " together less often; or start vLLM with --per-request-spec-decode-metrics detailed and let"
    " GuideLLM, AIPerf or draftquant measure ask it"
)


def claims(first: object) -> bool:
    """Whether a document is such a result."""
    keys = {"backend", "num_prompts", "model_id", "itls"}
    return isinstance(first, Mapping) and keys <= first.keys()


def read(path: Path) -> ForeignMeasurement:
    """All requests of one result.

    Raises:
        MeasureError: it is not detailed, requests failed, nothing was drafted, or events and the
            server's counters do not agree.
    """
    result = object_in(path)
    where = str(path)
    with reading(where, _DETAILED):
        events = [_num_events(one, place) for place, one in enumerate(_list(result, "itls"))]
        tokens = wholes(result, "output_lens")
        prompts = wholes(result, "input_lens")
        texts = [string({"text": one}, "text") for one in _list(result, "generated_texts")]
        if not len(events) == len(tokens) == len(prompts) == len(texts):
            raise AnswerProblem("itls, output_lens, input_lens, generated_texts: expected one each")
        if failed := whole({"failed": 0, **result}, "failed"):
            raise AnswerProblem(f"failed: {failed} requests: both runs need all verify steps")
    with reading(where, _TOLD):
        most = _num_draft_tokens(result)
        counted = whole(result, "spec_decode_num_drafts")
        if sum(events) != counted:
            raise AnswerProblem(
                f"itls: {sum(events):,} events came behind the first ones, but the server counted"
                f" {counted:,} verify steps (spec_decode_num_drafts): some came together, or others"
                " asked the server too, so that no request's number of verify steps is known"
            )
        requests = [
            _request(place, result, most, events[place]) for place in range(len(events))
        ]  # fmt: skip
    return ForeignMeasurement(
        name=path.name,
        tool="vllm bench serve",
        engine="vllm",
        model=str(result["model_id"] or ""),
        num_draft_tokens=most,
        settings={key: result[key] for key in ("backend", "temperature", "dataset", "seed")
                  if key in result},  # the last three as --metadata says them
        paired_by="place in the run, the prompt's length, and the text of the output",
        told_positions=False,
        to_keep_outputs=_DETAILED,
        requests=with_copies_together(requests, prompts),
    )  # fmt: skip


def _request(place: int, result: Fields, most: int, num_steps: int) -> ForeignRequest:
    num_prompt, num_tokens = result["input_lens"][place], result["output_lens"][place]
    accepted = num_tokens - 1 - num_steps  # prefill wrote the first
    if not 0 <= accepted <= most * num_steps:
        raise AnswerProblem(
            f"output_lens[{place}]: {num_steps} verify steps of K = {most} cannot have written"
            f" {num_tokens} tokens"
        )
    return ForeignRequest(
        id=f"request {place}",
        prompt_sha256=sha256_of([place, num_prompt]),
        num_output_tokens=num_tokens,
        output=result["generated_texts"][place],
        histogram=narrowest(num_steps, accepted, most),
    )


def _num_draft_tokens(result: Fields) -> int:
    """K: the server has a counter of each position."""
    rates = result.get("spec_decode_per_position_acceptance_rates")
    if not isinstance(rates, list) or not rates:
        raise AnswerProblem(
            "spec_decode_per_position_acceptance_rates: expected one rate for each position, got"
            f" {short(rates)}: the server drafts nothing, or /metrics cannot be read"
        )
    return len(rates)


def _list(result: Fields, key: str) -> list[object]:
    value = result.get(key)
    if not isinstance(value, list):
        raise AnswerProblem(f"{key}: expected a list, got {short(value)}")
    return value


def _num_events(value: object, place: int) -> int:
    if not isinstance(value, list):
        raise AnswerProblem(f"itls[{place}]: expected a list of seconds, got {short(value)}")
    return len(value)
