"""vLLM's answers as they came, one to a line, with its metrics of each request.

Source: vLLM 0.32.0 and 0.33.0, `entrypoints/openai/completion/protocol.py`,
`chat_completion/protocol.py` (`metrics.speculative_decoding`) and `run_batch.py`
(`BatchRequestOutput`: `custom_id` around the answer).
"""

from collections.abc import Mapping
from pathlib import Path

from ...recipes.errors import short
from ..errors import MeasureError
from ..measure.protocols.answer_fields import (
    AnswerProblem,
    Fields,
    object_,
    objects,
    text,
    whole,
    wholes,
)
from .foreign_files import lines_of, optional, reading, string, vllm_verify_steps
from .foreign_measurement import ForeignMeasurement, ForeignRequest, sha256_of, with_copies_together

_METRICS = (
    "start vLLM (0.29 or later) with --per-request-spec-decode-metrics detailed, ask without"
    " streaming, with return_token_ids: true, and write each answer as one line"
)
_CUT = ("abort", "error")
_OBJECTS = ("text_completion", "chat.completion")


def claims(first: object) -> bool:
    """Whether a first line is an answer, alone or of a batch."""
    if not isinstance(first, Mapping):
        return False
    return first.get("object") in _OBJECTS or {"custom_id", "response"} <= first.keys()


def read(path: Path) -> ForeignMeasurement:
    """All answers.

    Raises:
        MeasureError: an answer is none, has no verify steps, or does not name its prompt.
    """
    requests, lengths, sizes, versions, models = [], [], set(), set(), set()
    for where, line in lines_of(path):
        with reading(where, _METRICS):
            answer = _answer(line)
            metrics = answer.get("metrics")
            if not isinstance(metrics, Mapping):
                raise AnswerProblem(f"metrics: expected an object, got {short(metrics)}")
            most, histogram = vllm_verify_steps(object_(metrics, "speculative_decoding"))
            choices = objects(answer, "choices")
            if len(choices) != 1:
                raise AnswerProblem(f"choices: expected one (n = 1), got {len(choices)}")
            if choices[0].get("finish_reason") in _CUT:
                what = choices[0]["finish_reason"]
                raise AnswerProblem(f"finish_reason: the request failed or was cancelled: {what}")
            name, digest = _prompt(line, answer, choices[0])
            usage = object_(answer, "usage")
            lengths.append(
                optional(usage, "prompt_tokens", whole) if digest == sha256_of(name) else None
            )
            requests.append(
                ForeignRequest(
                    id=name,
                    prompt_sha256=digest,
                    num_output_tokens=whole(usage, "completion_tokens"),
                    output=_output(choices[0]),
                    histogram=histogram,
                )
            )
            sizes.add(most)
            models.add(text(answer, "model"))
            versions.add(_version(answer))
    if len(sizes) != 1:
        raise MeasureError(path, f"expected one num_spec_tokens (K), got {sorted(sizes)}",
                           fix="keep the answers of one server with one K in one file")  # fmt: skip
    return ForeignMeasurement(
        name=path.name,
        tool="answers of vLLM",
        engine="vllm",
        version=", ".join(sorted(versions - {""})),
        model=", ".join(sorted(models)),
        num_draft_tokens=sizes.pop(),
        paired_by="the prompt's token ids, or custom_id",
        to_keep_outputs="write the answers whole",
        requests=with_copies_together(requests, lengths),
    )


def _answer(line: Fields) -> Fields:
    answer = line
    if "custom_id" in line:
        _check_succeeded(line)
        answer = object_(object_(line, "response"), "body")
    _check_succeeded(answer)
    return answer


def _check_succeeded(fields: Fields) -> None:
    if fields.get("error") is not None:
        raise AnswerProblem(f"error: the request failed: {short(fields['error'])}")


def _prompt(line: Fields, answer: Fields, choice: Fields) -> tuple[str, str]:
    """A name, and an identity: by token ids, else by the id that the batch gives it."""
    ids = next((one for one in (choice, answer) if one.get("prompt_token_ids") is not None), None)
    custom = optional(line, "custom_id", text)
    if ids is not None:
        digest = sha256_of(wholes(ids, "prompt_token_ids"))
        return custom or digest[:12], digest
    if custom is None:
        raise AnswerProblem(
            "prompt_token_ids: expected the prompt's tokens (ask with return_token_ids: true), or a"
            " custom_id; without them nothing says which prompt was answered"
        )
    return custom, sha256_of(custom)


def _output(choice: Fields) -> str | None:
    if "text" in choice:
        return string(choice, "text")
    found: str | None = optional(object_(choice, "message"), "content", string)
    return found


def _version(answer: Fields) -> str:
    """system_fingerprint is "vllm-0.32.0-a083157d"."""
    name, _, rest = str(answer.get("system_fingerprint") or "").partition("-")
    return rest.partition("-")[0] if name == "vllm" else ""
