"""SGLang, over its own interface: POST /generate, GET /server_info; answers hold their own counts.

Read in the sources of 0.5.23 (paths below `srt`), the fields also in those of 0.5.6 to 0.5.15.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from typing_extensions import override

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.recording.decoding import prompt_seed
from ...calibration.server_client import PASSING, Event, Reply, ServerClient
from ...recipes.errors import MeasureError, short
from ..counting.acceptance_counts import Verification
from .measurement import ServerIdentity, Speculation
from .server_answers import (
    ARGUMENTS,
    AnswerProblem,
    Ask,
    Completion,
    EngineProtocol,
    Fields,
    check_length,
    checked_draft_tokens,
    gap,
    number,
    object_,
    optional,
    reading,
    sampling,
    section,
    text,
    told,
    whole,
    wholes,
)

OLDEST = "0.5.9"  # the first with a histogram; up to 0.5.10 by the second of these names
_FIX = f"give an SGLang server of {OLDEST} or later, not a proxy that rewrites answers"
_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
_PROPOSED = ("spec_num_proposed_drafts", "spec_draft_token_num")


def read_answer(
    reply: Reply, ask: Ask, num_draft_tokens: int | None, where: str, *, streamed: bool
) -> Completion:
    """What a prompt got; MeasureError: it was cut off, or lacks what was accepted."""
    if not reply.events:
        raise AnswerProblem("its stream has no event")
    events, last = reply.events, reply.events[-1]
    meta = object_(last.data, "meta_info")
    ended = _ended(meta, where)
    token_ids = _token_ids(events, whole(meta, "completion_tokens", least=1))
    check_length("output_ids", len(token_ids), ended, ask, where, "longer --context-length")
    histogram = None
    if num_draft_tokens is not None:
        histogram = _histogram(meta, len(token_ids), num_draft_tokens, where)
    num_top = ask.decoding.num_top_logprobs
    return Completion(
        token_ids=token_ids,
        ended=ended,
        histogram=histogram,
        accepted=_told_apart(events, histogram) if streamed else None,
        drafted=None,
        num_draft_tokens=num_draft_tokens if histogram and any(histogram) else None,
        token_logprob=_logprobs(meta, token_ids) if num_top else None,
        top_gap=_gaps(meta, len(token_ids)) if num_top > 1 else None,
        time_to_first_token=events[0].seconds if streamed else None,
        latency=last.seconds,
        num_attempts=reply.num_attempts,
    )


def _ended(meta: Fields, where: str) -> Literal["stop", "length"]:
    reason = section(meta, "finish_reason")
    kind = reason.get("type")
    if kind in ("stop", "length"):
        return cast(Literal["stop", "length"], kind)
    if kind == "abort":
        raise MeasureError(where, f"the server gave up: {short(reason.get('message'))}",
                           fix="see the server's own messages")  # fmt: skip
    raise AnswerProblem(
        f"finish_reason: expected stop or length, got {short(meta.get('finish_reason'))}"
    )


def _token_ids(events: Sequence[Event], num_tokens: int) -> tuple[int, ...]:
    # An event repeats everything, or with --incremental-streaming-output has only what is new
    # (managers/tokenizer_manager.py:2627-2671); completion_tokens is the sum in both.
    last = wholes(events[-1].data, "output_ids")
    if len(last) == num_tokens:
        return last
    ids = tuple(itertools.chain.from_iterable(wholes(e.data, "output_ids") for e in events))
    if len(ids) != num_tokens:
        raise AnswerProblem(f"completion_tokens: {num_tokens}, but {len(ids)} output_ids came")
    return ids


def _histogram(meta: Fields, num_tokens: int, num_draft_tokens: int, where: str) -> tuple[int, ...]:
    """[K + 1], checked against everything else that is reported about the steps.

    The counts end at the largest number seen, and cover the steps of this request only, with what
    the last one accepted beyond the end (managers/tokenizer_manager.py:3138-3210,
    managers/scheduler_components/batch_result_processor.py:829-836).
    """
    empty = (0,) * (num_draft_tokens + 1)
    if num_tokens == 1:  # prefill wrote it
        return empty
    key = next((key for key in _HISTOGRAMS if key in meta), None)
    if key is None:
        raise MeasureError(
            where,
            "the server drafts, but its answer has no spec_correct_drafts_histogram",
            fix=f"use SGLang {OLDEST} or later, and its Python server",
        )
    counts = wholes(meta, key)
    rounds = sum(counts)
    accepted = sum(j * count for j, count in enumerate(counts))
    expected = {"spec_verify_ct": rounds}
    expected |= {_first(meta, _ACCEPTED): accepted}
    expected |= {_first(meta, _PROPOSED): rounds * num_draft_tokens}
    for name, value in expected.items():
        if whole(meta, name) != value:
            raise AnswerProblem(f"{name}: {meta[name]}, but {key} gives {value}: {list(counts)}")
    # Each step writes what it accepted and one more token, the last up to K fewer; a request
    # that was put back once more reads its tokens again, which writes one without a step.
    written = 1 + rounds + accepted
    again = whole({"num_retractions": 0, **meta}, "num_retractions")
    fits = written - num_draft_tokens <= num_tokens <= written + again
    if len(counts) > len(empty) or not fits:
        what = f"{list(counts)} with K = {num_draft_tokens} cannot have written {num_tokens} tokens"
        raise AnswerProblem(f"{key}: {what}")
    return counts + empty[len(counts) :]


def _first(meta: Fields, names: Sequence[str]) -> str:
    return next((name for name in names if name in meta), names[0])


def _told_apart(
    events: Sequence[Event], histogram: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Accepted tokens step by step, if the stream had an event for each; else None.

    Events that nobody fetched become one (managers/tokenizer_manager.py:1966-1979).
    """
    if histogram is None or len(events) != sum(histogram) + 1:
        return None
    totals = [whole(object_(e.data, "meta_info"), "completion_tokens") for e in events]
    seen = [after - before - 1 for before, after in itertools.pairwise(totals)]
    # The last step may have accepted more than was written.
    left = sum(j * count for j, count in enumerate(histogram)) - sum(seen[:-1])
    accepted = (*seen[:-1], left) if seen else ()
    counted = tuple(accepted.count(j) for j in range(len(histogram)))
    return accepted if counted == histogram else None


def _logprobs(meta: Fields, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probabilities of the tokens, after temperature, before top-k and top-p; raw if greedy."""
    entries = _entries(meta.get("output_token_logprobs"), "output_token_logprobs")
    if tuple(token for _, token in entries) != token_ids:
        raise AnswerProblem("output_token_logprobs: not those of output_ids")
    return tuple(logprob for logprob, _ in entries)


def _gaps(meta: Fields, num_tokens: int) -> tuple[float, ...]:
    places = meta.get("output_top_logprobs")
    if not isinstance(places, list) or len(places) != num_tokens:
        what = f"expected {num_tokens} lists, got {short(places)}"
        raise AnswerProblem(f"output_top_logprobs: {what}")
    return tuple(gap([p for p, _ in _entries(v, "output_top_logprobs")]) for v in places)


def _entries(values: object, where: str) -> list[tuple[float, int]]:
    """An entry is [log-probability, id, text or null]."""
    if not isinstance(values, list):
        raise AnswerProblem(f"{where}: expected a list, got {short(values)}")
    entries = []
    for value in values:
        if not isinstance(value, list) or len(value) != 3 or type(value[1]) is not int:
            what = f"expected [log-probability, id, text], got {short(value)}"
            raise AnswerProblem(f"{where}: {what}")
        entries.append((number(value[0], where), value[1]))
    return entries


_IN_STREAMS = 4096  # tokens: events that repeat 4,096 tokens and their text have 30 MB together
_GREEDY_BACKENDS = ("aiter", "wave")  # attention on ROCm only
_SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


class SGLangProtocol(EngineProtocol):
    """One SGLang server: every answer holds its own counts."""

    _num_draft_tokens: int | None = None
    _streams_what_is_new = False
    _verifies_greedily = False

    @override
    async def identify(self, client: ServerClient) -> tuple[ServerIdentity, Speculation | None]:
        info = await client.get_object("/server_info")
        if "version" not in info or "speculative_algorithm" not in info:
            raise MeasureError(
                client.url,
                "its /server_info is not SGLang's: it has no version and speculative_algorithm",
                fix="see --engine",
            )
        named = info.get("served_model_name") is not None
        with reading(client.url, _FIX, "its answer to /server_info is not SGLang's: "):
            identity = ServerIdentity(
                engine="sglang",
                version=text(info, "version"),
                model=text(info, "served_model_name" if named else "model_path"),
                arguments=told(info, ARGUMENTS["sglang"]),
            )
            speculation = _speculation(client.url, info)
        self._num_draft_tokens = speculation.num_draft_tokens if speculation else None
        self._streams_what_is_new = info.get("incremental_streaming_output") is True
        self._verifies_greedily = speculation is not None and _verifies_greedily(info)
        return identity, speculation

    @override
    async def complete(self, client: ServerClient, prompt: Prompt, ask: Ask) -> Completion:
        if ask.decoding.sampled and self._verifies_greedily:
            temperature = ask.decoding.temperature
            raise MeasureError(
                client.url,
                f"temperature is {temperature}, but this server verifies greedily at any"
                " temperature (CPU, XPU, or ROCm without rejection sampling)",
                fix="start it with --speculative-use-rejection-sampling, or measure at temperature"
                " 0",
            )
        where = f"{client.url}: prompt {prompt.id}"
        body = _request(prompt, ask)
        # Log-probabilities would also be repeated in every event.
        short_enough = self._streams_what_is_new or ask.max_new_tokens <= _IN_STREAMS
        streamed = short_enough and not ask.decoding.num_top_logprobs
        if streamed:
            reply = await client.stream("/generate", body | {"stream": True}, failed=_failed)
        else:
            reply = await client.post("/generate", body)
        with reading(where, _FIX, "its answer to /generate is not SGLang's: "):
            return read_answer(reply, ask, self._num_draft_tokens, where, streamed=streamed)


def _speculation(url: str, info: Fields) -> Speculation | None:
    if info["speculative_algorithm"] is None:
        return None
    method = text(info, "speculative_algorithm")
    topk = info.get("speculative_eagle_topk")
    if topk not in (None, 1):
        raise MeasureError(
            url,
            f"it drafts trees (speculative_eagle_topk = {short(topk)}), whose rounds are not those"
            " of a chain of K tokens",
            fix="start it with --speculative-eagle-topk 1 and --speculative-num-draft-tokens one"
            " more than --speculative-num-steps",
        )
    if info.get("speculative_adaptive") is True:
        raise MeasureError(
            url,
            "it changes the number of drafted tokens while it runs",
            fix="start it without --speculative-adaptive",
        )
    key = "speculative_num_draft_tokens"  # K + 1; a chain of S steps proposes K = S
    return Speculation(
        num_draft_tokens=checked_draft_tokens(whole(info, key) - 1, f"{key} - 1"),
        method=method,
        draft=optional(info, "speculative_draft_model_path", text),
        draft_quantization=optional(info, "speculative_draft_model_quantization", text),
        lossy=_lossy(info),
        verification=_verification(info),
    )


def _verification(info: Fields) -> Verification | None:
    """None for a server older than the setting."""
    block = info.get("speculative_use_block_verification")
    return None if block is None else "block" if block is True else "standard"


def _lossy(info: Fields) -> tuple[str, ...]:
    lossy = [
        f"{name} = {value:g}"
        for name in _THRESHOLDS
        if (value := number(info.get(name, 1.0), name)) != 1
    ]
    # Told only with SGLANG_EXPOSE_OWN_ENV_VARS (scheduler_components/internal_state.py:138).
    states = info.get("internal_states")
    for state in states if isinstance(states, list) else []:
        variables = section({"state": state}, "state", "env_vars")
        if _SIMULATED in variables:
            lossy.append(f"{_SIMULATED} = {short(variables[_SIMULATED])}")
    return tuple(dict.fromkeys(lossy))


def _verifies_greedily(info: Fields) -> bool:
    """At any temperature (speculative/eagle_utils.py:485-500)."""
    if info.get("device") in ("cpu", "xpu"):
        return True
    return (
        info.get("attention_backend") in _GREEDY_BACKENDS
        and info.get("speculative_use_rejection_sampling") is not True
    )


def _request(prompt: Prompt, ask: Ask) -> dict[str, Any]:
    decoding = ask.decoding
    # Missing settings are taken from a server's --preferred-sampling-params.
    asked = sampling(ask, "max_new_tokens", "min_new_tokens")
    asked["top_k"] = decoding.top_k or -1
    if decoding.sampled:  # used only with --enable-deterministic-inference
        asked["sampling_seed"] = prompt_seed(decoding.seed, prompt.token_ids)
    body: dict[str, Any] = {"input_ids": list(prompt.token_ids), "sampling_params": asked}
    if decoding.num_top_logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": decoding.num_top_logprobs}
    return body


def _failed(event: Mapping[str, Any]) -> str | None:
    """An abort with a status that may pass, in a stream of status 200.

    managers/tokenizer_manager.py:1891-1922; a full queue is one of 503 (scheduler.py:3552-3589).
    """
    reason = section(event, "meta_info", "finish_reason")
    status = reason.get("status_code")
    if type(status) is int and status in PASSING:
        return f"{status} from /generate: {short(reason.get('message'))}"
    return None
