"""The events of a completion of vLLM's, read as one answer.

As they come (entrypoints/openai/completion/serving.py:257): one event per step with its token ids,
the last of them with the reason of the end; behind it one without choices, which has the usage and
the metrics.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.server_client import Reply, ServerClient
from ...recipes.errors import MeasureError, short
from ...recipes.strict_json import JsonProblem, decode
from .engine_protocol import Completion
from .server_counters import ENGINE_COUNTERS, Counters

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


# ---- Rounds of one request as differences of vLLM's counters, with nothing else in flight
#
# The counters are those of the whole server (v1/spec_decode/metrics.py:214), so any other request
# between two readings would be taken for ours: what finished and what was generated must be ours
# to
# the last token.

_VLLM = ENGINE_COUNTERS["vllm"]
_PAGE = "/metrics"
_ATTEMPTS = 5
_PATIENCE = 100  # readings
_POLL = 0.05  # seconds
_BETWEEN = 0.25  # seconds, for what an attempt that broke off has left running


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """One reading.

    Attributes:
        are_there: the server counts at all.
        num_running: requests that run or wait. num_finished: since the start, as the others.
        num_tokens: generated.
        num_rounds: None without speculation.
        accepted: by position of the draft token, from the first.
    """

    are_there: bool
    num_running: int
    num_finished: int
    num_tokens: int
    num_rounds: int | None
    accepted: tuple[int, ...]

    @property
    def num_draft_tokens(self) -> int | None:
        """K: there is one counter for each position, from the start of the server on."""
        return len(self.accepted) or None


async def read_counters(client: ServerClient) -> ServerCounters:
    """Read them now.

    Raises:
        ServerError: no answer.
        MeasureError: another server's.
    """
    text = await client.find_text(_PAGE) or ""
    found = Counters.parse(text, f"{client.url}{_PAGE}")
    assert _VLLM.accepted_at is not None
    positions = found.by_label(_VLLM.accepted_at.name, _VLLM.position_label)
    count = len(positions)
    if set(positions) != {str(i) for i in range(count)}:
        where, what = f"{client.url}{_PAGE}", f"counts odd positions: {sorted(positions)}"
        raise MeasureError(where, what, fix="give the address of a vLLM server")
    running = (found.total(f"vllm:num_requests_{state}") for state in ("running", "waiting"))
    finished = found.total("vllm:request_success_total")
    return ServerCounters(
        are_there=finished is not None,
        num_running=sum(number or 0 for number in running),
        num_finished=finished or 0,
        num_tokens=found.total("vllm:generation_tokens_total") or 0,
        num_rounds=found.total(_VLLM.verify_steps.name),
        accepted=tuple(positions[str(i)] for i in range(count)),
    )


async def counted_rounds(
    client: ServerClient, num_draft_tokens: int, ask: Callable[[], Awaitable[Streamed]]
) -> tuple[Streamed, tuple[int, ...]]:
    """Ask something, and count its rounds.

    Args:
        ask: the request; a repeated one is repeated once more, as all its attempts were counted.

    Returns:
        The answer, and its rounds by number of accepted tokens, [K + 1].

    Raises:
        MeasureError: other requests run there too, the server was started again meanwhile, or the
            counters do not move.
    """
    for _ in range(_ATTEMPTS):
        before = await _idle(client)
        streamed = await ask()
        if streamed.num_attempts == 1:
            after = await _after(client, before)
            return streamed, _rounds(client, before, after, streamed, num_draft_tokens)
        await asyncio.sleep(_BETWEEN)
    raise MeasureError(
        client.url,
        f"none of {_ATTEMPTS} requests was answered at the first attempt, and counters tell only"
        " of such ones what was accepted",
        fix="see the server's own messages, then run the same command again: what was measured"
        " is kept",
    )


async def _idle(client: ServerClient) -> ServerCounters:
    """The counters when nothing runs; what an attempt of ours has left ends soon."""
    for _ in range(_PATIENCE):
        counters = await read_counters(client)
        if not counters.num_running:
            return counters
        await asyncio.sleep(_POLL)
    raise _others(client, f"{counters.num_running} request(s) run there that are not ours")


async def _after(client: ServerClient, before: ServerCounters) -> ServerCounters:
    """The counters with our request; the last token may be sent before it is counted."""
    for _ in range(_PATIENCE):
        counters = await read_counters(client)
        if _went_back(before, counters):
            raise MeasureError(
                client.url,
                "its counters went back: it was started again meanwhile",
                fix="run the same command again: what was measured is kept",
            )
        if counters.num_finished > before.num_finished and not counters.num_running:
            return counters
        await asyncio.sleep(_POLL)
    if counters.num_running:
        raise _others(client, f"{counters.num_running} request(s) run there that are not ours")
    raise MeasureError(client.url, "answered, but counts no finished request",
                       fix="give the server itself, not a proxy over several")  # fmt: skip


def _rounds(
    client: ServerClient,
    before: ServerCounters,
    after: ServerCounters,
    streamed: Streamed,
    num_draft_tokens: int,
) -> tuple[int, ...]:
    finished = after.num_finished - before.num_finished
    tokens = after.num_tokens - before.num_tokens
    if finished != 1 or tokens != len(streamed.token_ids):
        raise _others(
            client,
            f"our request had {len(streamed.token_ids)} tokens, but the counters moved by"
            f" {finished} request(s) and {tokens} tokens",
        )
    if len(after.accepted) != num_draft_tokens or len(before.accepted) != num_draft_tokens:
        raise MeasureError(client.url, f"drafted K = {num_draft_tokens} tokens, now it does not",
                           fix="measure one server")  # fmt: skip
    assert after.num_rounds is not None
    assert before.num_rounds is not None
    reached = (
        after.num_rounds - before.num_rounds,
        *(b - a for a, b in zip(before.accepted, after.accepted, strict=True)),
        0,
    )
    return tuple(at_least - further for at_least, further in pairwise(reached))


def _went_back(before: ServerCounters, after: ServerCounters) -> bool:
    return (
        after.num_finished < before.num_finished
        or after.num_tokens < before.num_tokens
        or (after.num_rounds or 0) < (before.num_rounds or 0)
    )


def _others(client: ServerClient, what: str) -> MeasureError:
    return MeasureError(
        client.url,
        f"other requests run there while counters are all that tells what was accepted: {what}",
        fix="start the server with --per-request-spec-decode-metrics detailed (vLLM after 0.28), or"
        " keep others away",
    )
