"""Files of vLLM 0.32.0 and 0.33.0, SGLang 0.5.23 and their tools, with counts of each request."""

from collections.abc import Mapping
from pathlib import Path

from ...recipes.errors import MeasureError, short
from ...recipes.strict_json import parse_object
from ..measure.server_answers import (
    AnswerProblem,
    Fields,
    object_,
    objects,
    optional,
    reading,
    string,
    text,
    whole,
    wholes,
)
from .foreign_measurement import (
    ForeignMeasurement,
    ForeignRequest,
    check_finished,
    lines_of,
    sglang_verify_steps,
    sha256_of,
    vllm_verify_steps,
    with_copies_together,
    with_k,
)

_RUN_ANSWERS = (
    "start vLLM (0.29 or later) with --per-request-spec-decode-metrics detailed, or ask"
    " SGLang (0.5.23) with return_spec_tokens_details: true; ask without streaming, with"
    " return_token_ids: true, and write each answer as one line"
)
_RUN_SGLANG_RECORDS = (
    "start SGLang 0.5.10 or later with --export-metrics-to-file --export-metrics-to-file-dir"
    " DIR, without --log-requests (which cuts prompts), and --speculative-eagle-topk 1"
)
"""How each tool is run so that its files hold what a verdict needs."""

_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def read_answers(path: Path) -> ForeignMeasurement:
    """All answers, one per line; MeasureError: one has no verify steps, or names no prompt.

    vLLM: `metrics.speculative_decoding` (entrypoints/openai, protocol.py) and `custom_id` around it
    (run_batch.py). SGLang: `sglext.spec_tokens_details`, absent without a verify step
    (srt/entrypoints/openai, protocol.py), and `meta_info` of /generate
    (srt/managers/tokenizer_manager.py).
    """
    told, lengths, engines, versions, models = [], [], set(), set(), set()
    for place, (where, line) in enumerate(lines_of(path)):
        with reading(where, _RUN_ANSWERS):
            answer = _answer(line)
            choices = objects(answer, "choices")
            if len(choices) != 1:
                raise AnswerProblem(f"choices: expected one (n = 1), got {len(choices)}")
            check_finished(choices[0].get("finish_reason"))
            usage = object_(answer, "usage")
            num_tokens = whole(usage, "completion_tokens")
            engine, most, histogram = _verify_steps(answer, num_tokens)
            num_prompt = optional(usage, "prompt_tokens", whole)
            name, digest = _prompt(line, answer, choices[0])
            if not name and engine == "vllm":
                raise AnswerProblem(
                    "prompt_token_ids: expected the prompt's tokens (ask with return_token_ids:"
                    " true), or a custom_id; without them nothing says which prompt was answered"
                )
            lengths.append(None if digest else num_prompt)
            request = ForeignRequest(
                id=name or f"answer {place}",
                prompt_sha256=digest or sha256_of(name or [place, num_prompt]),
                num_output_tokens=num_tokens,
                output=_answer_text(choices[0]),
                histogram=histogram,
            )
            told.append((request, most))
            engines.add(engine)
            models.add(optional(answer, "model", text) or "")
            versions.add(_version(answer))
    most, requests = with_k(path, told)
    if len(engines - {""}) != 1:
        raise MeasureError(
            path,
            f"expected answers of one engine, got {sorted(engines)}",
            fix="keep the answers of one server in one file",
        )
    (engine,) = engines - {""}
    return ForeignMeasurement(
        name=path.name,
        tool=f"answers of {_NAMES[engine]}",
        engine=engine,
        version=", ".join(sorted(versions - {""})),
        model=", ".join(sorted(models - {""})),
        num_draft_tokens=most,
        paired_by="the prompt's token ids, or custom_id"
        + (", or place in the file and the prompt's length" if engine == "sglang" else ""),
        to_keep_outputs="write the answers whole",
        requests=with_copies_together(requests, lengths),
    )


def _verify_steps(answer: Fields, num_tokens: int) -> tuple[str, int, tuple[int, ...]]:
    """The engine, K and the histogram; "" and 0 for one token, about which SGLang says nothing."""
    if isinstance(answer.get("metrics"), Mapping):
        return "vllm", *vllm_verify_steps(object_(answer["metrics"], "speculative_decoding"))
    extension = optional(answer, "sglext", object_) or {}
    if extension.get("spec_tokens_details") is not None:
        told = object_(extension, "spec_tokens_details")
        return "sglang", *sglang_verify_steps(told, num_tokens)
    if num_tokens > 1:
        raise AnswerProblem(
            "expected metrics.speculative_decoding (vLLM) or sglext.spec_tokens_details (SGLang),"
            f" got {short(sorted(answer))}"
        )
    return "", *sglang_verify_steps({}, num_tokens)


def _answer(line: Fields) -> Fields:
    answer = line
    if "custom_id" in line:
        _check_succeeded(line)
        answer = object_(object_(line, "response"), "body")
    _check_succeeded(answer)
    if "meta_info" not in answer:
        return answer
    meta = object_(answer, "meta_info")
    return {
        "choices": [{**answer, "finish_reason": meta.get("finish_reason")}],
        "usage": meta,
        "sglext": {"spec_tokens_details": meta if "spec_verify_ct" in meta else None},
    }


def _check_succeeded(fields: Fields) -> None:
    if fields.get("error") is not None:
        raise AnswerProblem(f"error: the request failed: {short(fields['error'])}")


def _prompt(line: Fields, answer: Fields, choice: Fields) -> tuple[str, str]:
    custom = optional(line, "custom_id", text) or ""
    for fields in (choice, answer):
        if (ids := optional(fields, "prompt_token_ids", wholes)) is not None:
            digest = sha256_of(ids)
            return custom or digest[:12], digest
    return custom, ""


def _answer_text(choice: Fields) -> str | None:
    if "text" in choice:
        return string(choice, "text")
    return optional(object_(choice, "message"), "content", string)


def _version(answer: Fields) -> str:
    """system_fingerprint is "vllm-0.32.0-a083157d"."""
    name, _, rest = str(answer.get("system_fingerprint") or "").partition("-")
    return rest.partition("-")[0] if name == "vllm" else ""


def read_sglang_records(path: Path) -> ForeignMeasurement:
    """All requests of a `sglang-request-metrics-*.log`, each with its verify steps and its prompt.

    Source: srt/observability/request_metrics_exporter.py.
    """
    told = [_record(where, line) for where, line in lines_of(path)]
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


def _record(where: str, line: Fields) -> tuple[ForeignRequest, int]:
    """A request, its histogram up to the largest number seen, and K; 0 = it has no verify step."""
    with reading(where, _RUN_SGLANG_RECORDS):
        parameters = parse_object(string(line, "request_parameters"))
        prompt = {
            key: parameters[key] for key in ("text", "input_ids") if parameters.get(key) is not None
        }
        if not prompt:
            raise AnswerProblem("request_parameters: expected text or input_ids, got neither")
        check_finished(line.get("finish_reason"))
        digest = sha256_of(prompt)
        num_tokens = whole(line, "completion_tokens")
        most, histogram = sglang_verify_steps(line, num_tokens)
        sampling = parameters.get("sampling_params")
        request = ForeignRequest(
            id=optional(line, "id", text) or digest[:12],
            prompt_sha256=digest,
            settings=sampling if isinstance(sampling, Mapping) else {},
            num_output_tokens=num_tokens,
            output=_output_ids(line),
            histogram=histogram,
        )
        return request, most


def _output_ids(line: Fields) -> str | None:
    """[log-probability, token id, text] of each token, as text that distinguishes tokens."""
    entries = line.get("output_token_logprobs")
    if not isinstance(entries, list):
        return None
    ids = [entry[1] if isinstance(entry, list) and len(entry) > 1 else None for entry in entries]
    if not all(type(token_id) is int for token_id in ids):
        raise AnswerProblem(f"output_token_logprobs: expected triples, got {short(entries)}")
    return " ".join(map(str, ids))
