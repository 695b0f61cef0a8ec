"""The events of a completion of vLLM's, read as one answer.

As they come (entrypoints/openai/completion/serving.py:257): one event per step with its token ids,
the last of them with the reason of the end; behind it one without choices, which has the usage and
the metrics.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ....calibration.prompts.prompt_file import Prompt
from ....calibration.server_client import Reply
from ....recipes.errors import short
from ....recipes.strict_json import JsonProblem, decode
from ...errors import MeasureError
from .protocol import Completion

_LEAST_LOGPROB = -9999.0  # what it writes for the logarithm of 0, which JSON cannot say


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Of the rounds of one answer; fields as in `RequestRecord`."""

    num_draft_tokens: int
    histogram: tuple[int, ...]
    accepted: tuple[int, ...] | None
    drafted: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One answer; fields as in `Completion`.

    Attributes:
        metrics: None = the server drafts nothing, or does not tell.
        fingerprint: of the server's configuration, where it gives one.
    """

    token_ids: tuple[int, ...]
    ended: Literal["stop", "length"]
    metrics: Metrics | None
    fingerprint: str | None
    token_logprob: tuple[float, ...] | None
    top_gap: tuple[float, ...] | None
    time_to_first_token: float | None
    latency: float
    num_attempts: int

    def completion(
        self, *, histogram: tuple[int, ...] | None = None, num_draft_tokens: int | None = None
    ) -> Completion:
        """The answer, with rounds that its metrics tell, or that were counted elsewhere."""
        told = self.metrics
        return Completion(
            token_ids=self.token_ids,
            ended=self.ended,
            histogram=told.histogram if told else histogram,
            accepted=told.accepted if told else None,
            drafted=told.drafted if told else None,
            num_draft_tokens=told.num_draft_tokens if told else num_draft_tokens,
            token_logprob=self.token_logprob,
            top_gap=self.top_gap,
            time_to_first_token=self.time_to_first_token,
            latency=self.latency,
            num_attempts=self.num_attempts,
        )


def read_stream(reply: Reply, prompt: Prompt, num_top_logprobs: int, where: str) -> Streamed:
    """Read an answer.

    Raises:
        MeasureError: it is not vLLM's, lacks what was asked for, or is for another prompt.
    """
    try:
        return _read(reply, prompt, num_top_logprobs)
    except (LookupError, TypeError, ValueError, AttributeError, JsonProblem) as exc:
        raise MeasureError(
            where,
            f"its answer is not vLLM's: {type(exc).__name__}: {short(str(exc))}",
            fix="give the vLLM server itself, not a proxy that rewrites answers",
        ) from exc


def _read(reply: Reply, prompt: Prompt, num_top: int) -> Streamed:
    token_ids: list[int] = []
    logprobs: list[float] = []
    gaps: list[float] = []
    first = last = ended = None
    usage: Mapping[str, Any] = {}
    metrics: Mapping[str, Any] | None = None
    fingerprint = None
    for event in reply.events:
        data = event.data
        fingerprint = data.get("system_fingerprint") or fingerprint
        usage = data.get("usage") or usage
        metrics = (data.get("metrics") or {}).get("speculative_decoding") or metrics
        for choice in data["choices"]:
            if ended is not None:
                raise ValueError("tokens behind the end")
            given = choice.get("prompt_token_ids")
            if given is not None and tuple(given) != prompt.token_ids:
                raise ValueError("it continues another prompt than was asked")
            new = _token_ids(choice["token_ids"])
            token_ids += new
            if new:
                first = event.seconds if first is None else first
                last = event.seconds
            if num_top:
                logprobs += _logprobs(choice["logprobs"])
                gaps += _gaps(choice["logprobs"]) if num_top > 1 else []
            if choice["finish_reason"] is not None:
                ended, last = choice["finish_reason"], event.seconds
    if ended not in ("stop", "length"):
        raise ValueError(f"expected it to end with stop or length, got {short(ended)}")
    for name, count in (
        ("prompt_tokens", len(prompt.token_ids)),
        ("completion_tokens", len(token_ids)),
    ):
        if usage.get(name, count) != count:
            raise ValueError(f"{name}: expected {count}, got {short(usage[name])}")
    assert last is not None
    return Streamed(
        token_ids=tuple(token_ids),
        ended=ended,
        metrics=None if metrics is None else _metrics(metrics),
        fingerprint=fingerprint if isinstance(fingerprint, str) else None,
        token_logprob=tuple(logprobs) if num_top else None,
        top_gap=tuple(gaps) if num_top > 1 else None,
        time_to_first_token=first,
        latency=last,
        num_attempts=reply.num_attempts,
    )


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise ValueError(f"token_ids: expected whole numbers, got {short(value)}")
    return value


def _logprobs(value: Mapping[str, Any]) -> list[float]:
    return [_logprob(number) for number in value["token_logprobs"]]


def _gaps(value: Mapping[str, Any]) -> list[float]:
    """Between the two most likely; the emitted token stands there too, wherever it ranks."""
    gaps = []
    for place in value["top_logprobs"]:
        best, second, *_ = sorted(map(_logprob, place.values()), reverse=True)
        gaps.append(best - second)
    return gaps


def _logprob(number: object) -> float:
    if type(number) not in (int, float):
        raise ValueError(f"logprobs: expected numbers, got {short(number)}")
    return max(float(number), _LEAST_LOGPROB)  # type: ignore[arg-type] # it is one of the two


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What is read of metrics.speculative_decoding (entrypoints/generate/base/protocol.py:100)."""

    num_spec_tokens: int
    acceptance_histogram: tuple[int, ...]
    per_step_accepted: tuple[int, ...] | None = None
    per_step_drafted: tuple[int, ...] | None = None


_READ = ("num_spec_tokens", "acceptance_histogram", "per_step_accepted", "per_step_drafted")


def _metrics(value: Mapping[str, Any]) -> Metrics:
    """Rounds by number, and one by one where there are any and the server is `detailed`."""
    told: _Told = decode(_Told, {key: value[key] for key in _READ if key in value})
    return Metrics(
        num_draft_tokens=told.num_spec_tokens,
        histogram=told.acceptance_histogram,
        accepted=told.per_step_accepted,
        drafted=told.per_step_drafted,
    )
