"""What an engine answers to a prompt, and the stream of answers to many of them.

An engine is anything that takes prompts and gives answers as they come: in this process (`offline`)
or behind HTTP (`server`).
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..prompts.prompt_file import Prompt

LEAST_LOGPROB = -9999.0
"""What vLLM's server writes for the logarithm of 0, which JSON cannot say."""
_MAX_UNREAD_BYTES = 4 * 2**30

TopLogprobs = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One continuation.

    Attributes:
        token_ids: at least one.
        ended: "stop" = with the end-of-text token, "length" = with the last token asked for.
        states: name of the file with the hidden states, in the shared folder.
        token_logprob: of each token; None = not asked for.
        top: the most likely tokens at each place; None = not asked for.
    """

    token_ids: tuple[int, ...]
    ended: Literal["stop", "length"]
    states: str
    token_logprob: tuple[float, ...] | None = None
    top: tuple[TopLogprobs, ...] | None = None


class Engine(ABC):
    """Takes prompts and gives answers, in any order."""

    @abstractmethod
    def submit(self, position: int, prompt: Prompt) -> None:
        """Hand over a prompt; `position` names its answer."""

    @abstractmethod
    def next_answer(self) -> tuple[int, Answer]:
        """Wait for an answer: the position of its prompt, and what was said.

        Raises:
            TraceError: the engine has failed.
        """


def answers(
    engine: Engine,
    prompts: Sequence[tuple[int, Prompt]],
    *,
    most_in_flight: int,
    bytes_per_token: int,
    max_new_tokens: int,
) -> Iterator[tuple[int, Answer]]:
    """The answer to each prompt, as they come.

    No more prompts are in flight than may be, nor so many that their states could take more than
    4 GiB: an answer is in flight until the next one is asked for, so whoever takes its file away
    meanwhile bounds the shared folder.
    """
    waiting = deque(prompts)
    sizes: dict[int, int] = {}
    while waiting or sizes:
        while waiting and len(sizes) < most_in_flight:
            position, prompt = waiting[0]
            size = (len(prompt.token_ids) + max_new_tokens) * bytes_per_token
            if sizes and sum(sizes.values()) + size > _MAX_UNREAD_BYTES:
                break
            engine.submit(position, prompt)
            sizes[position] = size
            waiting.popleft()
        position, answer = engine.next_answer()
        yield position, answer
        del sizes[position]


def most_likely(logprobs: Sequence[tuple[int, float]], count: int) -> TopLogprobs:
    """The `count` most likely of some tokens; engines add the emitted one to those asked for."""
    bounded = [(token, max(logprob, LEAST_LOGPROB)) for token, logprob in logprobs]
    return tuple(sorted(bounded, key=lambda pair: (-pair[1], pair[0]))[:count])
