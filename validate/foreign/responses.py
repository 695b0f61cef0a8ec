"""Answers of vLLM or SGLang as they came, one to a line, with what they count of each request.

Source: vLLM 0.32.0 and 0.33.0, `entrypoints/openai/completion/protocol.py`,
`chat_completion/protocol.py` (`metrics.speculative_decoding`) and `run_batch.py`
(`BatchRequestOutput`: `custom_id` around the answer). SGLang 0.5.23, `srt/entrypoints/openai`,
`protocol.py` (`SglExt.spec_tokens_details`, absent where there was no verify step), and of its own
`/generate` `srt/managers/tokenizer_manager.py` (`meta_info`).
"""

from collections.abc import Mapping
from pathlib import Path

from ...recipes.errors import MeasureError, short
from ..measure.answer_fields import AnswerProblem, Fields, object_, objects, text, whole, wholes
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
    vllm_verify_steps,
    with_copies_together,
    with_k,
)

_METRICS = (
    "start vLLM (0.29 or later) with --per-request-spec-decode-metrics detailed, or ask SGLang"
    " (0.5.23) with return_spec_tokens_details: true; ask without streaming, with"
    " return_token_ids: true, and write each answer as one line"
)
_OBJECTS = ("text_completion", "chat.completion")
_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def claims(first: object) -> bool:
    """Whether a first line is an answer, alone or of a batch."""
    if not isinstance(first, Mapping):
        return False
    return (
        first.get("object") in _OBJECTS
        or {"custom_id", "response"} <= first.keys()
        or {"meta_info", "text"} <= first.keys()
    )


def read(path: Path) -> ForeignMeasurement:
    """All answers.

    Raises:
        MeasureError: an answer is none, has no verify steps, or does not name its prompt.
    """
    told, lengths, engines, versions, models = [], [], set(), set(), set()
    for place, (where, line) in enumerate(lines_of(path)):
        with reading(where, _METRICS):
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
                output=_output(choices[0]),
                histogram=histogram,
            )
            told.append((request, most))
            engines.add(engine)
            models.add(optional(answer, "model", text) or "")
            versions.add(_version(answer))
    most, requests = with_k(path, told)
    if len(engines - {""}) != 1:
        raise MeasureError(path, f"expected answers of one engine, got {sorted(engines)}",
                           fix="keep the answers of one server in one file")  # fmt: skip
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
    """The engine, K and the histogram; "" and 0 of one token, of which SGLang says nothing."""
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
    """In the form of OpenAI's answers."""
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
    """A name, and the identity of its tokens; "" for what the answer does not say."""
    custom = optional(line, "custom_id", text) or ""
    for fields in (choice, answer):
        if fields.get("prompt_token_ids") is not None:
            digest = sha256_of(wholes(fields, "prompt_token_ids"))
            return custom or digest[:12], digest
    return custom, ""


def _output(choice: Fields) -> str | None:
    if "text" in choice:
        return string(choice, "text")
    found: str | None = optional(object_(choice, "message"), "content", string)
    return found


def _version(answer: Fields) -> str:
    """system_fingerprint is "vllm-0.32.0-a083157d"."""
    name, _, rest = str(answer.get("system_fingerprint") or "").partition("-")
    return rest.partition("-")[0] if name == "vllm" else ""
