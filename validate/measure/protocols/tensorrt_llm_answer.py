"""An answer of TensorRT-LLM's /v1/completions as a stream: its tokens and its rounds.

Read in the sources of 1.0 to 1.3 (paths below `tensorrt_llm`; functions, as lines move):

- An event of a stream tells what one response of the executor added; there is a response after the
  first step, the last, and every `stream_interval`-th, 1 unless configured
  (_torch/pyexecutor/py_executor.py, _handle_responses).
- `avg_decoded_tokens_per_iter` is tokens so far / steps so far, as a 32-bit float
  (cpp batch_manager/llmRequest.h, getAvgDecodedTokensPerIter). Prefill is a step too
  (_torch/speculative/spec_sampler_base.py, _request_common_handling). So every event tells how many
  steps it stands for, and a step's accepted tokens are its tokens less one.
- Tokens behind the end of the output are dropped before they are told (ibid., update_requests). So
  a round is known only if K + 1 tokens of output stood still to be written when it began: of these
  alone the histogram is. That depends on the position alone, not on the outcome, so leaving the
  others out biases nothing. Replay does likewise.
- A stop token that ends the output may be dropped from it, and is counted in the average.
- `top_logprobs` are keyed by text: of two tokens with the same text one is lost.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from ....calibration.server_client import Event, Reply
from ....recipes.errors import short
from ...errors import MeasureError
from .answer_fields import (
    AnswerProblem,
    Fields,
    gap,
    number,
    object_,
    objects,
    whole,
    wholes,
)
from .protocol import Ask, Completion

_LEAST = 0.5  # no step writes less than a token
_NEAR = 1e-3  # steps are whole numbers but for the rounding of a 32-bit float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the events of a stream wrote.

    Attributes:
        chunks: tokens of each event that has some. steps: that each of these stands for.
        seconds: when each came.
        finish_reason: of the last event; None = the answer has no end.
        logprobs: of each of these events.
    """

    chunks: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    finish_reason: object
    logprobs: tuple[object, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(token for chunk in self.chunks for token in chunk)

    @property
    def num_steps(self) -> int:
        """Prefill and all rounds."""
        return sum(self.steps)

    @classmethod
    def of(cls, events: Sequence[Event]) -> Self:
        """Read the events.

        Raises:
            AnswerProblem: they are not TensorRT-LLM's, or not all that was written.
        """
        chunks: list[tuple[int, ...]] = []
        totals, seconds, logprobs = [0], [], []
        finish_reason: object = None
        written = 0
        for event in events:
            choices = objects(event.data, "choices")
            if not choices:  # the last event tells the usage alone
                _check_usage(event.data, written)
                continue
            choice = choices[0]
            finish_reason = choice.get("finish_reason")
            ids = wholes(choice, "token_ids")
            if not ids:
                continue
            written += len(ids)
            chunks.append(ids)
            totals.append(_steps(choice, written, ended=finish_reason == "stop"))
            seconds.append(event.seconds)
            logprobs.append(choice.get("logprobs"))
        if not chunks:
            raise AnswerProblem("its stream has no token")
        return cls(
            chunks=tuple(chunks),
            steps=tuple(b - a for a, b in itertools.pairwise(totals)),
            seconds=tuple(seconds),
            finish_reason=finish_reason,
            logprobs=tuple(logprobs),
        )


def read_answer(reply: Reply, ask: Ask, num_draft_tokens: int | None, where: str) -> Completion:
    """What a prompt got.

    Args:
        num_draft_tokens: K; None = the server drafts nothing.
        where: server and prompt, for errors.

    Raises:
        AnswerProblem: it is not TensorRT-LLM's.
        MeasureError: it was cut off, or rounds cannot be told apart.
    """
    steps = Steps.of(reply.events)
    token_ids = steps.token_ids
    ended = _ended(steps, ask, where)
    if max(steps.steps) > 1:
        raise MeasureError(
            where,
            f"one event of its stream tells of {max(steps.steps)} rounds together, so that what"
            " each accepted is not known",
            fix="start it with `stream_interval: 1`, the default",
        )
    accepted = _accepted(steps.chunks, len(token_ids), num_draft_tokens)
    num_top = ask.decoding.num_top_logprobs
    return Completion(
        token_ids=token_ids,
        ended=ended,
        histogram=_histogram(accepted, num_draft_tokens),
        accepted=accepted,
        drafted=None,
        num_cut_rounds=0 if accepted is None else len(steps.chunks) - 1 - len(accepted),
        num_draft_tokens=None,
        token_logprob=_logprobs(steps) if num_top else None,
        top_gap=_gaps(steps) if num_top > 1 else None,
        time_to_first_token=steps.seconds[0],
        latency=reply.events[-1].seconds,
        num_attempts=reply.num_attempts,
    )


def _check_usage(fields: Fields, written: int) -> None:
    told = whole(object_(fields, "usage"), "completion_tokens")
    if told != written:
        raise AnswerProblem(f"completion_tokens: {told}, but {written} token_ids came")


def _steps(choice: Fields, written: int, *, ended: bool) -> int:
    """Steps so far, from the average."""
    average = number(choice.get("avg_decoded_tokens_per_iter"), "avg_decoded_tokens_per_iter")
    for tokens in (written, written + 1) if ended else (written,):  # with a dropped stop token
        steps = tokens / max(average, _LEAST)
        if round(steps) >= 1 and abs(steps - round(steps)) < _NEAR and average >= _LEAST:
            return round(steps)
    raise AnswerProblem(f"avg_decoded_tokens_per_iter: {average} is no average of {written} tokens")


def _ended(steps: Steps, ask: Ask, where: str) -> Literal["stop", "length"]:
    num_tokens = len(steps.token_ids)
    if num_tokens > ask.max_new_tokens:
        raise AnswerProblem(f"token_ids: {num_tokens}, but {ask.max_new_tokens} were asked for")
    if steps.finish_reason == "stop":
        return "stop"
    if steps.finish_reason != "length":
        what = f"finish_reason: expected stop or length, got {short(steps.finish_reason)}"
        raise AnswerProblem(what)
    if num_tokens < ask.max_new_tokens:
        raise MeasureError(
            where,
            f"its answer was cut off after {num_tokens} of {ask.max_new_tokens} tokens",
            fix="start the server with a larger --max_seq_len, or ask for fewer tokens",
        )
    return "length"


def _accepted(
    chunks: Sequence[tuple[int, ...]], num_tokens: int, num_draft_tokens: int | None
) -> tuple[int, ...] | None:
    """Of the rounds at whose beginning K + 1 tokens stood still to be written, in order."""
    most = 1 + (num_draft_tokens or 0)
    if len(chunks[0]) != 1 or max(map(len, chunks)) > most:
        sizes = short([len(chunk) for chunk in chunks])
        raise AnswerProblem(f"steps of {sizes} tokens, expected 1, then at most {most} each")
    if num_draft_tokens is None:
        return None
    accepted, written = [], 1
    for chunk in chunks[1:]:
        if written + most > num_tokens:
            break
        accepted.append(len(chunk) - 1)
        written += len(chunk)
    return tuple(accepted)


def _histogram(
    accepted: tuple[int, ...] | None, num_draft_tokens: int | None
) -> tuple[int, ...] | None:
    if accepted is None or num_draft_tokens is None:
        return None
    return tuple(accepted.count(j) for j in range(num_draft_tokens + 1))


def _logprobs(steps: Steps) -> tuple[float, ...]:
    found: list[float] = []
    for chunk, logprobs in zip(steps.chunks, steps.logprobs, strict=True):
        found += [number(v, "token_logprobs") for v in _listed(logprobs, "token_logprobs", chunk)]
    return tuple(found)


def _gaps(steps: Steps) -> tuple[float, ...]:
    found: list[float] = []
    for chunk, logprobs in zip(steps.chunks, steps.logprobs, strict=True):
        for top in _listed(logprobs, "top_logprobs", chunk):
            if not isinstance(top, Mapping):
                raise AnswerProblem(f"top_logprobs: expected objects, got {short(top)}")
            found.append(gap([number(value, "top_logprobs") for value in top.values()]))
    return tuple(found)


def _listed(logprobs: object, key: str, chunk: Sequence[int]) -> list[object]:
    """One value for each token of an event."""
    values = logprobs.get(key) if isinstance(logprobs, Mapping) else None
    if not isinstance(values, list) or len(values) != len(chunk):
        raise AnswerProblem(f"{key}: expected {len(chunk)} values, got {short(values)}")
    return values
