"""vLLM's OpenAI server: per-request metrics in its answers, or its counters around each request.

Facts as of vLLM 0.32 (paths within its package). A completion is one event per step with its token
ids, and one without choices, which has the usage and the metrics
(entrypoints/openai/completion/serving.py:257).
"""

import asyncio
import operator
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from typing_extensions import override

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.recording.decoding import GREEDY
from ...calibration.server_client import Reply, ServerClient
from ...recipes.errors import MeasureError, short
from ...recipes.strict_json import JsonProblem, decode
from ..counting.acceptance_counts import Verification
from .measurement import ServerIdentity, Speculation
from .server_answers import (
    ARGUMENTS,
    STREAM,
    AnswerProblem,
    Ask,
    Completion,
    Counters,
    EngineProtocol,
    completion_body,
    gap,
    section,
    told,
)

_OLDEST = (0, 10, 2)  # pull request 22587: return_token_ids
_LOSSLESS = ("standard", "block", "strict", "probabilistic")
"""`rejection_sample_method`s (config/speculative.py:84; the last two are from before 0.20) that
keep the target's distribution; "synthetic" and "fly" do not."""
_PROBE = Prompt(id="probe", category="probe", token_ids=(1, 2, 3, 4))
_DETAILED = "start the server with --per-request-spec-decode-metrics detailed (vLLM after 0.28)"


class VLLMProtocol(EngineProtocol):
    """One vLLM server."""

    _model = ""
    _speculation: Speculation | None = None
    _is_counted = False

    @override
    async def identify(self, client: ServerClient) -> tuple[ServerIdentity, Speculation | None]:
        version = await _version(client)
        served = await _served(client)
        self._model = str(served["id"])
        info = await client.find_object("/server_info?config_format=json") or {}
        config = {**section(info, "vllm_config"), "vllm_env": section(info, "vllm_env")}
        ask = Ask(decoding=GREEDY, max_new_tokens=8, ignore_eos=True)
        probed, fingerprint = await self._stream(client, _PROBE, ask)
        self._speculation = await self._find_speculation(client, config, probed)
        self._is_counted = self._speculation is not None and probed.num_draft_tokens is None
        # Where only the server's counters show what was accepted.
        self.most_in_flight = 1 if self._is_counted else None
        known = {**served, "system_fingerprint": fingerprint}
        arguments = told(known, ("root", "max_model_len", "system_fingerprint"))
        for part, keys in ARGUMENTS["vllm"].items():
            values = told(section(config, part), keys)
            arguments |= {f"{part}.{key}": value for key, value in values.items()}
        identity = ServerIdentity(
            engine="vllm", version=version, model=self._model, arguments=arguments
        )
        return identity, self._speculation

    @override
    async def complete(self, client: ServerClient, prompt: Prompt, ask: Ask) -> Completion:
        if self._is_counted:
            assert self._speculation is not None

            async def asked() -> Completion:
                return (await self._stream(client, prompt, ask))[0]

            return await counted_steps(client, self._speculation.num_draft_tokens, asked)
        answer, _ = await self._stream(client, prompt, ask)
        if self._speculation is not None and answer.num_draft_tokens is None:
            what = "its answer has no metrics of speculation, as earlier ones had"
            fix = "give the server itself, not a proxy over servers that are started differently"
            raise MeasureError(f"{client.url}: prompt {prompt.id}", what, fix=fix)
        return answer

    async def _stream(
        self, client: ServerClient, prompt: Prompt, ask: Ask
    ) -> tuple[Completion, str | None]:
        extra = {**STREAM, "return_token_ids": True}
        body = completion_body(self._model, prompt, ask, extra, int)
        if ask.decoding.num_top_logprobs:
            body["return_tokens_as_token_ids"] = True
        reply = await client.stream("/v1/completions", body)
        where = f"{client.url}: prompt {prompt.id}"
        return read_stream(reply, prompt, ask.decoding.num_top_logprobs, where)

    async def _find_speculation(
        self, client: ServerClient, config: Mapping[str, Any], probed: Completion
    ) -> Speculation | None:
        told = section(config, "speculative_config")
        counters = await read_counters(client)
        num_draft_tokens = probed.num_draft_tokens or counters.num_draft_tokens
        if num_draft_tokens is None:
            is_known = counters.are_there or "speculative_config" in config
            if is_known and not told and counters.num_rounds is None:
                return None
            raise MeasureError(
                client.url,
                "its answers have no metrics, and it does not count by position what is accepted"
                " (--disable-log-stats): whether it drafts, and what is accepted, cannot be known",
                fix=f"{_DETAILED}, or without --disable-log-stats",
            )
        method = told.get("rejection_sample_method")
        shown = _text(method) or short(method)
        return Speculation(
            num_draft_tokens=num_draft_tokens,
            method=_text(told.get("method")),
            draft=_text(told.get("model")),
            draft_quantization=_draft_quantization(told),
            lossy=() if method in (None, *_LOSSLESS) else (f"rejection_sample_method = {shown}",),
            acceptance_told=bool(told),
            verification=_verification(told),
        )


def _verification(told: Mapping[str, Any]) -> Verification | None:
    """The rule of its `rejection_sample_method`; the default is "standard"."""
    if not told:
        return None
    return "block" if told.get("rejection_sample_method") == "block" else "standard"


def _draft_quantization(speculative: Mapping[str, Any]) -> str | None:
    """As given to the server, or as found in the draft's config; None = it does not say."""
    config = section(speculative, "draft_model_config")
    quantization = _text(speculative.get("quantization")) or _text(config.get("quantization"))
    return quantization or ("none" if "quantization" in config else None)


async def _version(client: ServerClient) -> str:
    answer = await client.find_object("/version")
    version = answer.get("version") if answer else None
    if not isinstance(version, str) or not version.isprintable():
        raise MeasureError(
            client.url,
            "does not say its version at /version, as vLLM does",
            fix="give the address of a vLLM server, or its --engine",
        )
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers and tuple(int(n or 0) for n in numbers.groups()) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        what = f"expected vLLM {oldest} or later, which returns token ids, got {version}"
        raise MeasureError(client.url, what, fix="serve with a later vLLM")
    return version


async def _served(client: ServerClient) -> Mapping[str, Any]:
    models = (await client.get_object("/v1/models")).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], Mapping):
        raise MeasureError(client.url, "serves no model", fix="give the address of a vLLM server")
    owner, name = models[0].get("owned_by"), models[0].get("id")
    if owner != "vllm":
        raise MeasureError(
            client.url,
            f"expected vLLM, but its model is owned by {short(owner)}",
            fix="give the --engine that runs there",
        )
    if not isinstance(name, str) or not name or not name.isprintable():
        raise MeasureError(
            client.url,
            f"its model has no name, but {short(name)}",
            fix="start it with --served-model-name",
        )
    return models[0]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.isprintable() else None


_LEAST_LOGPROB = -9999.0  # what it writes for the logarithm of 0, which JSON cannot say


def read_stream(
    reply: Reply, prompt: Prompt, num_top_logprobs: int, where: str
) -> tuple[Completion, str | None]:
    """An answer, and the fingerprint of the server's configuration; or a MeasureError."""
    try:
        return _read(reply, prompt, num_top_logprobs)
    except (
        LookupError, TypeError, ValueError, AttributeError, JsonProblem, AnswerProblem,
    ) as exc:  # fmt: skip
        what = f"its answer is not vLLM's: {type(exc).__name__}: {short(str(exc))}"
        fix = "give the vLLM server itself, not a proxy that rewrites answers"
        raise MeasureError(where, what, fix=fix) from exc


def _read(reply: Reply, prompt: Prompt, num_top: int) -> tuple[Completion, str | None]:
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
                logprobs += map(_logprob, choice["logprobs"]["token_logprobs"])
                # The emitted token is there too, whatever its rank.
                for place in choice["logprobs"]["top_logprobs"] if num_top > 1 else ():
                    gaps.append(gap([*map(_logprob, place.values())]))
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
    told: _Told | None = None
    if metrics is not None:
        named = {key: metrics[key] for key in _Told.__dataclass_fields__ if key in metrics}
        told = decode(_Told, named)
    completion = Completion(
        num_draft_tokens=None if told is None else told.num_spec_tokens,
        histogram=None if told is None else told.acceptance_histogram,
        accepted=None if told is None else told.per_step_accepted,
        drafted=None if told is None else told.per_step_drafted,
        token_ids=tuple(token_ids),
        ended=ended,
        token_logprob=tuple(logprobs) if num_top else None,
        top_gap=tuple(gaps) if num_top > 1 else None,
        time_to_first_token=first,
        latency=last,
        num_attempts=reply.num_attempts,
    )
    return completion, fingerprint if isinstance(fingerprint, str) else None


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise ValueError(f"token_ids: expected whole numbers, got {short(value)}")
    return value


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


_PAGE = "/metrics"
_DRAFTED = "vllm:spec_decode_num"  # v1/spec_decode/metrics.py of 0.32 and 0.33, SpecDecodingProm
_ATTEMPTS = 5
_PATIENCE = 100  # readings
_POLL = 0.05  # seconds
_BETWEEN = 0.25  # seconds, for what a broken attempt has left running


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """One reading of the counters of the whole server, `accepted` by position of the draft token.

    Whatever finished and was generated between two readings must be ours to the last token.
    """

    are_there: bool
    num_running: int
    num_finished: int
    num_tokens: int
    num_rounds: int | None
    accepted: tuple[int, ...]

    @property
    def sums(self) -> tuple[int, int, int]:
        """The values that never fall."""
        return self.num_finished, self.num_tokens, self.num_rounds or 0

    @property
    def num_draft_tokens(self) -> int | None:
        """K: there is one counter for each position, from the start of the server on."""
        return len(self.accepted) or None


async def read_counters(client: ServerClient) -> ServerCounters:
    """Read them now; MeasureError if they are another server's."""
    text = await client.find_text(_PAGE) or ""
    counters = Counters.parse(text, f"{client.url}{_PAGE}")
    positions = counters.by_label(f"{_DRAFTED}_accepted_tokens_per_pos_total", "position")
    count = len(positions)
    if set(positions) != {str(i) for i in range(count)}:
        where, what = f"{client.url}{_PAGE}", f"counts odd positions: {sorted(positions)}"
        raise MeasureError(where, what, fix="give the address of a vLLM server")
    running = (counters.total(f"vllm:num_requests_{state}") for state in ("running", "waiting"))
    finished = counters.total("vllm:request_success_total")
    return ServerCounters(
        are_there=finished is not None,
        num_running=sum(number or 0 for number in running),
        num_finished=finished or 0,
        num_tokens=counters.total("vllm:generation_tokens_total") or 0,
        num_rounds=counters.total(f"{_DRAFTED}_drafts_total"),
        accepted=tuple(positions[str(i)] for i in range(count)),
    )


async def counted_steps(
    client: ServerClient, num_draft_tokens: int, ask: Callable[[], Awaitable[Completion]]
) -> Completion:
    """Send a request, and count its verify steps, until the first attempt is answered."""
    for _ in range(_ATTEMPTS):
        before = await _idle(client)
        answer = await ask()
        if answer.num_attempts == 1:
            after = await _idle(client, before)
            histogram = _rounds(client, before, after, len(answer.token_ids), num_draft_tokens)
            return replace(answer, histogram=histogram, num_draft_tokens=num_draft_tokens)
        await asyncio.sleep(_BETWEEN)
    raise MeasureError(
        client.url,
        f"none of {_ATTEMPTS} requests was answered at the first attempt, and counters tell only"
        " of such ones what was accepted",
        fix="see the server's own messages, then run the same command again: what was measured is"
        " kept",
    )


async def _idle(client: ServerClient, before: ServerCounters | None = None) -> ServerCounters:
    """The counters when nothing runs, and after `before` with one more finished request.

    What our own attempts left ends soon; the last token may be sent before it is counted.
    """
    for _ in range(_PATIENCE):
        counters = await read_counters(client)
        if before is not None and any(map(operator.lt, counters.sums, before.sums)):
            raise MeasureError(
                client.url,
                "its counters went back: it was started again meanwhile",
                fix="run the same command again: what was measured is kept",
            )
        finished = before is None or counters.num_finished > before.num_finished
        if finished and not counters.num_running:
            return counters
        await asyncio.sleep(_POLL)
    if counters.num_running:
        raise _others(client, f"{counters.num_running} request(s) run there that are not ours")
    raise MeasureError(
        client.url,
        "answered, but counts no finished request",
        fix="give the server itself, not a proxy over several",
    )


def _rounds(
    client: ServerClient,
    before: ServerCounters,
    after: ServerCounters,
    num_tokens: int,
    num_draft_tokens: int,
) -> tuple[int, ...]:
    finished = after.num_finished - before.num_finished
    tokens = after.num_tokens - before.num_tokens
    if finished != 1 or tokens != num_tokens:
        raise _others(
            client,
            f"our request had {num_tokens} tokens, but the counters moved by"
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


def _others(client: ServerClient, what: str) -> MeasureError:
    return MeasureError(
        client.url,
        f"other requests run there while counters are all that tells what was accepted: {what}",
        fix=f"{_DETAILED}, or keep others away",
    )
