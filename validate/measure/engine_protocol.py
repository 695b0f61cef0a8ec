"""What `run` needs of an engine's interface."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.recording.decoding import Decoding
from ...calibration.server_client import ServerClient
from .measurement import EngineName, ServerIdentity, Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is asked for each prompt.

    Attributes:
        decoding: with the number of most likely tokens to tell.
        max_new_tokens: at most; exactly, if `ignore_eos`.
    """

    decoding: Decoding
    max_new_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's answer to one prompt; fields as in `RequestRecord`.

    Attributes:
        num_draft_tokens: K as this answer tells; None = it does not, or nothing is drafted.
    """

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


class EngineProtocol(ABC):
    """One engine's interface. It keeps no state but what `identify` found."""

    @property
    def most_in_flight(self) -> int | None:
        """More requests at a time than this cannot be told apart; None = any number."""
        return None

    @abstractmethod
    async def identify(self, client: ServerClient) -> tuple[ServerIdentity, Speculation | None]:
        """Who answers there, and how it drafts.

        Raises:
            MeasureError: another engine, one that is too old, without a model or metrics; or it
                drafts in a way that cannot be counted.
        """

    @abstractmethod
    async def complete(self, client: ServerClient, prompt: Prompt, ask: Ask) -> Completion:
        """Continue a prompt.

        Raises:
            ServerError: no answer.
            MeasureError: one that is not the engine's; the engine drafts but does not say what it
                accepted, or cannot do what is asked for while it drafts.
        """


Answer = Mapping[str, Any]


# ---- How each engine is queried, and how its answers are read

_CLASSES: dict[EngineName, tuple[str, str]] = {
    "vllm": ("vllm_server", "VLLMProtocol"),
    "sglang": ("sglang_server", "SGLangProtocol"),
    "tensorrt-llm": ("tensorrt_llm_server", "TensorRTLLMProtocol"),
}
"""Engine -> module beside this one, and its class, which is constructed without arguments."""


def get_protocol(engine: EngineName) -> EngineProtocol:
    """The interface of an engine, for one server."""
    module, name = _CLASSES[engine]
    protocol: EngineProtocol = getattr(importlib.import_module(f".{module}", __package__), name)()
    return protocol
