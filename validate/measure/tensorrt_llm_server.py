"""TensorRT-LLM, over trtllm-serve: POST /v1/completions, GET /version, /v1/models and its metrics.

Read in the sources of 1.0 to 1.3 (paths below `tensorrt_llm`; functions, as lines move). No answer
has a histogram, but every event of a stream says how many steps it stands for, prefill's too. A
token after the end of the output is dropped before it is told, so a verify step is known only if
K + 1 tokens of output were still to be written when it began: the histogram covers only these,
which causes no bias, as it depends only on the position. Never reported are relaxed acceptance
(`use_relaxed_acceptance_for_thinking`), which is lossy, and `max_concurrency` and
`draft_len_schedule`, by which it drafts less when more requests run.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from typing_extensions import override

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.recording.decoding import GREEDY
from ...calibration.server_client import Event, Reply, ServerClient
from ...recipes.errors import MeasureError, short
from ...recipes.strict_json import JsonProblem, parse_json
from .measurement import ServerIdentity, Speculation
from .server_answers import (
    STREAM,
    AnswerProblem,
    Ask,
    Completion,
    Counters,
    EngineProtocol,
    Fields,
    check_length,
    checked_draft_tokens,
    completion_body,
    gap,
    number,
    object_,
    objects,
    reading,
    text,
    whole,
    wholes,
)

_LEAST = 0.5  # no step writes less than a token
_NEAR = 1e-3  # steps are whole numbers but for the rounding of a 32-bit float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the events of a stream wrote: the tokens of each, and its number of steps."""

    chunks: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    finish_reason: object
    logprobs: tuple[object, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(itertools.chain.from_iterable(self.chunks))

    @classmethod
    def of(cls, events: Sequence[Event]) -> Self:
        """AnswerProblem: they are not TensorRT-LLM's, or not all that was written."""
        chunks: list[tuple[int, ...]] = []
        totals, seconds, logprobs = [0], [], []
        finish_reason: object = None
        written = 0
        for event in events:
            choices = objects(event.data, "choices")
            if not choices:  # the last event has only the usage
                told = whole(object_(event.data, "usage"), "completion_tokens")
                if told != written:
                    raise AnswerProblem(f"completion_tokens: {told}, but {written} token_ids came")
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
    """What a prompt got; MeasureError: it was cut off, or steps cannot be separated."""
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
    num_top, key = ask.decoding.num_top_logprobs, "token_logprobs"
    columns = range(1 + (num_draft_tokens or 0))
    return Completion(
        token_ids=token_ids,
        ended=ended,
        histogram=None if accepted is None else tuple(map(accepted.count, columns)),
        accepted=accepted,
        drafted=None,
        num_cut_rounds=0 if accepted is None else len(steps.chunks) - 1 - len(accepted),
        num_draft_tokens=None,
        token_logprob=tuple(number(v, key) for v in _listed(steps, key)) if num_top else None,
        top_gap=tuple(map(_gap, _listed(steps, "top_logprobs"))) if num_top > 1 else None,
        time_to_first_token=steps.seconds[0],
        latency=reply.events[-1].seconds,
        num_attempts=reply.num_attempts,
    )


def _steps(choice: Fields, written: int, *, ended: bool) -> int:
    """Tokens so far over their average, a 32-bit float (cpp batch_manager/llmRequest.h)."""
    average = number(choice.get("avg_decoded_tokens_per_iter"), "avg_decoded_tokens_per_iter")
    for tokens in (written, written + 1) if ended else (written,):  # with a dropped stop token
        steps = tokens / max(average, _LEAST)
        if round(steps) >= 1 and abs(steps - round(steps)) < _NEAR and average >= _LEAST:
            return round(steps)
    raise AnswerProblem(f"avg_decoded_tokens_per_iter: {average} is no average of {written} tokens")


def _ended(steps: Steps, ask: Ask, where: str) -> Literal["stop", "length"]:
    ended, count = steps.finish_reason, len(steps.token_ids)
    check_length("token_ids", count, str(ended), ask, where, "larger --max_seq_len")
    if ended != "stop" and ended != "length":
        raise AnswerProblem(f"finish_reason: expected stop or length, got {short(ended)}")
    return ended


def _accepted(
    chunks: Sequence[tuple[int, ...]], num_tokens: int, num_draft_tokens: int | None
) -> tuple[int, ...] | None:
    """Accepted tokens of the steps that began with K + 1 tokens still to be written, in order."""
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


def _gap(top: object) -> float:
    if not isinstance(top, Mapping):
        raise AnswerProblem(f"top_logprobs: expected objects, got {short(top)}")
    return gap([number(value, "top_logprobs") for value in top.values()])


def _listed(steps: Steps, key: str) -> Iterator[object]:
    """A value for each token; if two tokens have the same text, `top_logprobs` loses one."""
    for chunk, logprobs in zip(steps.chunks, steps.logprobs, strict=True):
        values = logprobs.get(key) if isinstance(logprobs, Mapping) else None
        if not isinstance(values, list) or len(values) != len(chunk):
            raise AnswerProblem(f"{key}: expected {len(chunk)} values, got {short(values)}")
        yield from values


_PATH = "/v1/completions"
_NOT_ITS = "its answer is not TensorRT-LLM's: "
_FIX = "give a trtllm-serve of 1.0 or later (PyTorch backend), not a proxy that rewrites answers"
_METRICS_ON = (
    "start it with `return_perf_metrics: true` (1.3) or `enable_iter_perf_stats: true` in its"
    " --extra_llm_api_options"
)
_GROUPS = ("model", "parallel", "kv_cache", "speculative")
_PROBE = Prompt(id="probe", category="", token_ids=tuple(range(1, 17)))
_PROBE_TOKENS = 32
_READS = 3  # of /metrics, which a read empties, and which waits two seconds for more


class TensorRTLLMProtocol(EngineProtocol):
    """One TensorRT-LLM server: every stream tells its own verify steps."""

    _model = ""
    _num_draft_tokens: int | None = None

    @override
    async def identify(self, client: ServerClient) -> tuple[ServerIdentity, Speculation | None]:
        # A server that does not report its K is asked for a few tokens, which show K.
        with reading(client.url, _FIX, _NOT_ITS):
            models = objects(await client.get_object("/v1/models"), "data")
            if not models or models[0].get("owned_by") != "tensorrt_llm":
                raise MeasureError(
                    client.url,
                    "its /v1/models are not owned by tensorrt_llm",
                    fix="see --engine",
                )
            self._model = text(models[0], "id")
            version = text(await client.get_object("/version"), "version")
            told = await _told(client)
            labels = told.get("speculative")
            speculation = _speculation(labels) if told else await self._seen(client)
        self._num_draft_tokens = speculation.num_draft_tokens if speculation else None
        arguments = {
            f"{group}.{key}": value
            for group, fields in told.items()
            for key, value in fields.items()
        }
        identity = ServerIdentity(
            engine="tensorrt-llm", version=version, model=self._model, arguments=arguments
        )
        return identity, speculation

    @override
    async def complete(self, client: ServerClient, prompt: Prompt, ask: Ask) -> Completion:
        where = f"{client.url}: prompt {prompt.id}"
        # _torch/speculative/spec_sampler_base.py, _request_common_handling: the answer breaks off.
        if ask.decoding.num_top_logprobs and self._num_draft_tokens is not None:
            raise MeasureError(
                where,
                "TensorRT-LLM keeps no log-probabilities while it drafts",
                fix="ask for none, or a server without a draft",
            )
        reply = await client.stream(_PATH, _request(self._model, prompt, ask), failed=_failed)
        with reading(where, _FIX, _NOT_ITS):
            return read_answer(reply, ask, self._num_draft_tokens, where)

    async def _seen(self, client: ServerClient) -> Speculation | None:
        ask = Ask(decoding=GREEDY, max_new_tokens=_PROBE_TOKENS, ignore_eos=True)
        reply = await client.stream(_PATH, _request(self._model, _PROBE, ask), failed=_failed)
        steps = Steps.of(reply.events)
        iterations: list[Fields] = []
        for _ in range(_READS):
            iterations += _iterations(await client.get_text("/metrics"))
            if ratios := _drafted(iterations):
                most = checked_draft_tokens(max(ratios), "numDraftTokens per request")
                return Speculation(num_draft_tokens=most)
        if not iterations or sum(steps.steps) < len(steps.token_ids):
            raise MeasureError(
                client.url,
                "it does not tell whether it drafts, and how many tokens: its metrics are off",
                fix=_METRICS_ON,
            )
        return None


async def _told(client: ServerClient) -> dict[str, Mapping[str, str]]:
    """Labels of the `trtllm_X_config_info` gauges of 1.3 by X; empty where the server has none."""
    page = await client.find_text("/prometheus/metrics")
    if page is None:  # an older version, or metrics are off
        return {}
    samples = Counters.parse(page, client.url).samples
    groups = {group: samples.get(f"trtllm_{group}_config_info") for group in _GROUPS}
    told = {group: sample[0][0] for group, sample in groups.items() if sample}
    return told if "model" in told else {}


def _speculation(labels: Mapping[str, str] | None) -> Speculation | None:
    if labels is None:
        return None
    proposed = labels.get("spec_num_tokens", "")
    if not proposed.isascii() or not proposed.isdigit() or len(proposed) > 4:
        what = f"spec_num_tokens: expected a number of tokens, got {short(proposed)}"
        raise AnswerProblem(what)
    return Speculation(
        num_draft_tokens=checked_draft_tokens(int(proposed), "spec_num_tokens"),
        method=labels.get("spec_method"),
        draft=labels.get("spec_draft_model"),
    )


def _iterations(page: str) -> list[Fields]:
    try:
        return list(objects({"/metrics": parse_json(page)}, "/metrics"))
    except JsonProblem as exc:
        raise AnswerProblem(f"/metrics: {exc}") from exc


def _drafted(iterations: Sequence[Fields]) -> list[int]:
    """Drafted tokens per request, for the iterations that drafted.

    The largest is K: tokens of id 0 are not counted (_torch/pyexecutor/py_executor.py,
    _update_iter_stats).
    """
    stats = [i["specDecodingStats"] for i in iterations if i.get("specDecodingStats") is not None]
    if not all(isinstance(each, Mapping) for each in stats):
        raise AnswerProblem("specDecodingStats: expected an object")
    return [
        -(-drafted // whole(each, "numRequestsWithDraftTokens", least=1))
        for each in stats
        if (drafted := whole(each, "numDraftTokens"))
    ]


def _request(model: str, prompt: Prompt, ask: Ask) -> dict[str, Any]:
    body = completion_body(model, prompt, ask, {"detokenize": False, **STREAM})
    return body if ask.decoding.sampled else body | {"top_k": 1}  # greedy; 0 is all tokens


def _failed(event: Mapping[str, Any]) -> str | None:
    """Whether a problem in a stream may pass."""
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, Mapping) and choice.get("finish_reason") in ("timeout", "cancelled"):
            return f"its answer to {_PATH} ended by {choice['finish_reason']}"
    return None
