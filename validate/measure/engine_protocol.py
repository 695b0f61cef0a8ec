"""How each engine is asked, and what is needed of its interface."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.recording.decoding import Decoding
from ...calibration.server_client import ServerClient
from .measurement import EngineName, ServerIdentity, Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is asked for each prompt; `max_new_tokens` exactly, if `ignore_eos`."""

    decoding: Decoding
    max_new_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's answer to one prompt, as in `RequestRecord`; `num_draft_tokens` is its K."""

    token_ids: tuple[int, ...]
    ended: Literal["stop", "length"]
    histogram: tuple[int, ...] | None
    accepted: tuple[int, ...] | None
    drafted: tuple[int, ...] | None
    num_cut_rounds: int = 0
    num_draft_tokens: int | None
    token_logprob: tuple[float, ...] | None
    top_gap: tuple[float, ...] | None
    time_to_first_token: float | None
    latency: float
    num_attempts: int


NEUTRAL: Mapping[str, float] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n": 1,
}
"""Of a request: a server takes what is not said from its own defaults, or from the model's
generation_config.json (vLLM: entrypoints/openai/completion/protocol.py:322)."""


class EngineProtocol(ABC):
    """One engine's interface. It keeps no state but what `identify` found."""

    @property
    def most_in_flight(self) -> int | None:
        """More requests at a time than this cannot be told apart; None = any number."""
        return None

    @abstractmethod
    async def identify(self, client: ServerClient) -> tuple[ServerIdentity, Speculation | None]:
        """Who answers there, and how it drafts; MeasureError: in a way that cannot be counted."""

    @abstractmethod
    async def complete(self, client: ServerClient, prompt: Prompt, ask: Ask) -> Completion:
        """Continue a prompt; MeasureError: the engine drafts but does not say what it accepted."""


_CLASSES: Mapping[EngineName, str] = {
    "vllm": "vllm_server.VLLMProtocol",
    "sglang": "sglang_server.SGLangProtocol",
    "tensorrt-llm": "tensorrt_llm_server.TensorRTLLMProtocol",
}
"""Engine -> module beside this one, and its class, which is constructed without arguments."""


def get_protocol(engine: EngineName) -> EngineProtocol:
    """The interface of an engine, for one server."""
    module, _, name = _CLASSES[engine].partition(".")
    protocol: EngineProtocol = getattr(importlib.import_module(f".{module}", __package__), name)()
    return protocol
