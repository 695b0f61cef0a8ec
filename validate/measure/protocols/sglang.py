"""SGLang, over its own interface: POST /generate, GET /server_info.

Read in the sources of 0.5.23 (paths below `sglang/srt`); see also `sglang_answer`.

- The gauges of /metrics and `avg_spec_accept_length` of /server_info are of an interval of the log,
  of all requests, and count rounds of finished ones: nothing here reads them.
- `speculative_num_draft_tokens` is K + 1; a chain (topk 1) of S steps proposes K = S
  (arg_groups/speculative_hook.py:1256-1265).
- An abort with a status ends a stream of status 200 (managers/tokenizer_manager.py:1891-1922), an
  error too, as {"error": ...} (entrypoints/http_server.py:965-974); a full queue is an abort with
  503 (managers/scheduler.py:3552-3589).
- Verification is greedy at any temperature on CPU, XPU, and ROCm without
  --speculative-use-rejection-sampling (speculative/eagle_utils.py:485-500).
"""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ....calibration.prompts.prompt_file import Prompt
from ....calibration.recording.decoding import prompt_seed
from ....calibration.server_client import PASSING, ServerClient
from ....recipes.errors import short
from ...errors import MeasureError
from ..measurement import ServerIdentity, Speculation
from .answer_fields import AnswerProblem, Fields, checked_draft_tokens, number, text, told, whole
from .protocol import Ask, Completion, EngineProtocol
from .sglang_answer import OLDEST, read_answer

_IN_STREAMS = 4096  # tokens: events that repeat 4,096 tokens and their text have 30 MB together
_GREEDY_BACKENDS = ("aiter", "wave")  # attention of ROCm alone
_SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
_ARGUMENTS = (
    "model_path",
    "revision",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "device",
    "page_size",
    "tp_size",
    "dp_size",
    "ep_size",
    "attention_backend",
    "sampling_backend",
    "chat_template",
    "max_running_requests",
    "chunked_prefill_size",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "disable_cuda_graph",
    "enable_deterministic_inference",
    "stream_interval",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_draft_model_quantization",
    "speculative_attention_mode",
    "speculative_use_rejection_sampling",
    "speculative_use_block_verification",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
)
"""Of some hundred, which hold keys of the server too: those that change what is measured."""


class SGLangProtocol(EngineProtocol):
    """One SGLang server: every answer holds its own counts."""

    def __init__(self) -> None:
        self._num_draft_tokens: int | None = None
        self._streams_what_is_new = False
        self._verifies_greedily = False

    @override
    async def identify(self, client: ServerClient) -> tuple[ServerIdentity, Speculation | None]:
        info = await client.get_object("/server_info")
        if "version" not in info or "speculative_algorithm" not in info:
            raise MeasureError(client.url, "its /server_info is not SGLang's: it has no version and"
                               " speculative_algorithm", fix="see --engine")  # fmt: skip
        named = info.get("served_model_name") is not None
        try:
            identity = ServerIdentity(
                engine="sglang",
                version=text(info, "version"),
                model=text(info, "served_model_name" if named else "model_path"),
                arguments=told(info, _ARGUMENTS),
            )
            speculation = _speculation(client.url, info)
        except AnswerProblem as exc:
            raise _not_sglang(client.url, "/server_info", exc) from exc
        self._num_draft_tokens = speculation.num_draft_tokens if speculation else None
        self._streams_what_is_new = info.get("incremental_streaming_output") is True
        self._verifies_greedily = speculation is not None and _verifies_greedily(info)
        return identity, speculation

    @override
    async def complete(self, client: ServerClient, prompt: Prompt, ask: Ask) -> Completion:
        if ask.decoding.sampled and self._verifies_greedily:
            raise MeasureError(
                client.url,
                f"temperature is {ask.decoding.temperature}, but this server verifies greedily at"
                " any temperature (CPU, XPU, or ROCm without rejection sampling)",
                fix="start it with --speculative-use-rejection-sampling, or measure at"
                " temperature 0",
            )
        where = f"{client.url}: prompt {prompt.id}"
        body = _request(prompt, ask)
        # Log-probabilities would be repeated in every event too.
        short_enough = self._streams_what_is_new or ask.max_new_tokens <= _IN_STREAMS
        streamed = short_enough and not ask.decoding.num_top_logprobs
        if streamed:
            reply = await client.stream("/generate", body | {"stream": True}, failed=_failed)
        else:
            reply = await client.post("/generate", body)
        try:
            return read_answer(reply, ask, self._num_draft_tokens, where, streamed=streamed)
        except AnswerProblem as exc:
            raise _not_sglang(where, "/generate", exc) from exc


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
            fix="start it with --speculative-eagle-topk 1 and --speculative-num-draft-tokens"
            " one more than --speculative-num-steps",
        )
    if info.get("speculative_adaptive") is True:
        raise MeasureError(url, "it changes the number of drafted tokens while it runs",
                           fix="start it without --speculative-adaptive")  # fmt: skip
    return Speculation(
        num_draft_tokens=checked_draft_tokens(
            whole(info, "speculative_num_draft_tokens") - 1, "speculative_num_draft_tokens - 1"
        ),
        method=method,
        draft=_text_or_none(info, "speculative_draft_model_path"),
        draft_quantization=_text_or_none(info, "speculative_draft_model_quantization"),
        lossy=_lossy(info),
    )


def _lossy(info: Fields) -> tuple[str, ...]:
    found = [
        f"{name} = {value:g}"
        for name in _THRESHOLDS
        if (value := number(info.get(name, 1.0), name)) != 1
    ]
    # Told only with SGLANG_EXPOSE_OWN_ENV_VARS (scheduler_components/internal_state.py:138).
    states = info.get("internal_states")
    for state in states if isinstance(states, list) else []:
        variables = state.get("env_vars") if isinstance(state, Mapping) else None
        if isinstance(variables, Mapping) and _SIMULATED in variables:
            found.append(f"{_SIMULATED} = {short(variables[_SIMULATED])}")
    return tuple(dict.fromkeys(found))


def _verifies_greedily(info: Fields) -> bool:
    if info.get("device") in ("cpu", "xpu"):
        return True
    return (
        info.get("attention_backend") in _GREEDY_BACKENDS
        and info.get("speculative_use_rejection_sampling") is not True
    )


def _request(prompt: Prompt, ask: Ask) -> dict[str, Any]:
    decoding = ask.decoding
    # A server may have --preferred-sampling-params: what is not said here is taken from them.
    sampling: dict[str, Any] = {
        "max_new_tokens": ask.max_new_tokens,
        "ignore_eos": ask.ignore_eos,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": decoding.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_new_tokens": 0,
        "n": 1,
    }
    if decoding.sampled:  # heeded with --enable-deterministic-inference alone
        sampling["sampling_seed"] = prompt_seed(decoding.seed, prompt.token_ids)
    body: dict[str, Any] = {"input_ids": list(prompt.token_ids), "sampling_params": sampling}
    if decoding.num_top_logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": decoding.num_top_logprobs}
    return body


def _failed(event: Mapping[str, Any]) -> str | None:
    """An abort of a status that may pass: see `ServerClient.stream`."""
    meta = event.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    status = reason.get("status_code") if isinstance(reason, Mapping) else None
    if isinstance(reason, Mapping) and type(status) is int and status in PASSING:
        return f"{status} from /generate: {short(reason.get('message'))}"
    return None


def _text_or_none(info: Fields, key: str) -> str | None:
    return None if info.get(key) is None else text(info, key)


def _not_sglang(where: str, path: str, problem: AnswerProblem) -> MeasureError:
    return MeasureError(
        where,
        f"its answer to {path} is not SGLang's: {problem}",
        fix=f"give an SGLang server of {OLDEST} or later, not a proxy that rewrites answers",
    )
