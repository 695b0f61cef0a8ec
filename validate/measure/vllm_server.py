"""vLLM's OpenAI server: per-request metrics in its answers, or its counters around each request.

Facts as of vLLM 0.32 (paths within its package). `return_token_ids` is what an older server lacks:
it came with 0.10.2 (pull request 22587).
"""

import re
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.recording.decoding import GREEDY, Decoding, prompt_seed
from ...calibration.server_client import ServerClient
from ...recipes.errors import MeasureError, short
from .engine_protocol import Ask, Completion, EngineProtocol
from .measurement import ServerIdentity, Speculation
from .vllm_answer import Streamed, counted_rounds, read_counters, read_stream

_OLDEST = (0, 10, 2)
_LOSSLESS = ("standard", "block", "strict", "probabilistic")
"""`rejection_sample_method`s (config/speculative.py:84; the last two are those of before 0.20) that
keep the target's distribution; "synthetic" and "fly" do not."""
_ARGUMENTS = {
    "model_config": ("dtype", "quantization", "enforce_eager", "logprobs_mode"),
    "cache_config": ("cache_dtype", "enable_prefix_caching"),
    "parallel_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
    ),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "async_scheduling"),
    "attention_config": ("backend",),
    "speculative_config": ("rejection_sample_method", "draft_sample_method"),
    "vllm_env": ("VLLM_BATCH_INVARIANT",),
}
"""What figures depend on, of its configuration and environment, which only a server with
VLLM_SERVER_DEV_MODE=1 tells (entrypoints/serve/dev/server_info/api_router.py:43)."""
_PROBE = Prompt(id="probe", category="probe", token_ids=(1, 2, 3, 4))
_DETAILED = "start the server with --per-request-spec-decode-metrics detailed (vLLM after 0.28)"


class VLLMProtocol(EngineProtocol):
    """One vLLM server."""

    def __init__(self) -> None:
        self._model = ""
        self._speculation: Speculation | None = None
        self._is_counted = False

    @property
    @override
    def most_in_flight(self) -> int | None:
        # Where only the server's counters tell what was accepted.
        return 1 if self._is_counted else None

    @override
    async def identify(self, client: ServerClient) -> tuple[ServerIdentity, Speculation | None]:
        version = await _version(client)
        served = await _served(client)
        self._model = str(served["id"])
        config = await _config(client)
        ask = Ask(decoding=GREEDY, max_new_tokens=8, ignore_eos=True)
        probed = await self._stream(client, _PROBE, ask)
        self._speculation = await self._find_speculation(client, config, probed)
        self._is_counted = self._speculation is not None and probed.metrics is None
        told = {
            f"{section}.{key}": _section(config, section).get(key)
            for section, keys in _ARGUMENTS.items()
            for key in keys
        }
        arguments = {
            "root": served.get("root"),
            "max_model_len": served.get("max_model_len"),
            "system_fingerprint": probed.fingerprint,
            **told,
        }
        identity = ServerIdentity(
            engine="vllm",
            version=version,
            model=self._model,
            arguments={key: value for key, value in arguments.items() if _is_plain(value)},
        )
        return identity, self._speculation

    @override
    async def complete(self, client: ServerClient, prompt: Prompt, ask: Ask) -> Completion:
        if self._is_counted:
            assert self._speculation is not None
            most = self._speculation.num_draft_tokens
            streamed, histogram = await counted_rounds(
                client, most, lambda: self._stream(client, prompt, ask)
            )
            return streamed.completion(histogram=histogram, num_draft_tokens=most)
        streamed = await self._stream(client, prompt, ask)
        if self._speculation is not None and streamed.metrics is None:
            raise MeasureError(
                f"{client.url}: prompt {prompt.id}",
                "its answer has no metrics of speculation, as earlier ones had",
                fix="give the server itself, not a proxy over servers that are started differently",
            )
        return streamed.completion()

    async def _stream(self, client: ServerClient, prompt: Prompt, ask: Ask) -> Streamed:
        body = {"model": self._model, "prompt": list(prompt.token_ids), **_asked(ask, prompt)}
        reply = await client.stream("/v1/completions", body)
        where = f"{client.url}: prompt {prompt.id}"
        return read_stream(reply, prompt, ask.decoding.num_top_logprobs, where)

    async def _find_speculation(
        self, client: ServerClient, config: Mapping[str, Any], probed: Streamed
    ) -> Speculation | None:
        """How the server drafts, told by its configuration, an answer or its counters."""
        told = _section(config, "speculative_config")
        counters = await read_counters(client)
        num_draft_tokens = (
            probed.metrics.num_draft_tokens if probed.metrics else counters.num_draft_tokens
        )
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
        return Speculation(
            num_draft_tokens=num_draft_tokens,
            method=_text(told.get("method")),
            draft=_text(told.get("model")),
            draft_quantization=_draft_quantization(told),
            lossy=()
            if method is None or method in _LOSSLESS
            else (f"rejection_sample_method = {_text(method) or short(method)}",),
            acceptance_told=bool(told),
        )


def _draft_quantization(speculative: Mapping[str, Any]) -> str | None:
    """As the server was told, else as it found it in the draft's config; None = it does not say."""
    found = _section(speculative, "draft_model_config")
    own = _text(speculative.get("quantization")) or _text(found.get("quantization"))
    return own or ("none" if "quantization" in found else None)


def _asked(ask: Ask, prompt: Prompt) -> dict[str, Any]:
    """All that decides what is written.

    A server takes what is not said from the model's generation_config.json
    (entrypoints/openai/completion/protocol.py:322).
    """
    decoding: Decoding = ask.decoding
    asked: dict[str, Any] = {
        "max_tokens": ask.max_new_tokens,
        "ignore_eos": ask.ignore_eos,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": decoding.top_k,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "min_tokens": 0,
        "n": 1,
        "stream": True,
        # Metrics ride on the event behind the last token, which only this asks for.
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if decoding.sampled:
        asked["seed"] = prompt_seed(decoding.seed, prompt.token_ids)
    if decoding.num_top_logprobs:
        asked |= {"logprobs": decoding.num_top_logprobs, "return_tokens_as_token_ids": True}
    return asked


async def _version(client: ServerClient) -> str:
    answer = await client.find_object("/version")
    version = answer.get("version") if answer else None
    if not isinstance(version, str) or not version.isprintable():
        raise MeasureError(client.url, "does not say its version at /version, as vLLM does",
                           fix="give the address of a vLLM server, or its --engine")  # fmt: skip
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers and tuple(int(n or 0) for n in numbers.groups()) < _OLDEST:
        raise MeasureError(
            client.url,
            f"expected vLLM {'.'.join(map(str, _OLDEST))} or later, which returns token ids, got"
            f" {version}",
            fix="serve with a later vLLM",
        )
    return version


async def _served(client: ServerClient) -> Mapping[str, Any]:
    """The first of the served models, which is the target; the others are its adapters."""
    models = (await client.get_object("/v1/models")).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], Mapping):
        raise MeasureError(client.url, "serves no model", fix="give the address of a vLLM server")
    owner, name = models[0].get("owned_by"), models[0].get("id")
    if owner != "vllm":
        raise MeasureError(client.url, f"expected vLLM, but its model is owned by {short(owner)}",
                           fix="give the --engine that runs there")  # fmt: skip
    if not isinstance(name, str) or not name or not name.isprintable():
        raise MeasureError(client.url, f"its model has no name, but {short(name)}",
                           fix="start it with --served-model-name")  # fmt: skip
    return models[0]


async def _config(client: ServerClient) -> Mapping[str, Any]:
    """Its configuration, empty where it does not tell."""
    answer = await client.find_object("/server_info?config_format=json")
    told = answer or {}
    return {**_section(told, "vllm_config"), "vllm_env": _section(told, "vllm_env")}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _is_plain(value: object) -> bool:
    return _text(value) is not None or type(value) in (int, bool)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.isprintable() else None
