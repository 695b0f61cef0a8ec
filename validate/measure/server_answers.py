"""How to ask engines' servers, and what they answer: hostile JSON, and counters."""

import importlib
import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ...recipes.errors import MeasureError, short
from ...recipes.packages import table_beside
from ...recipes.strict_json import JsonProblem
from .measurement import MOST_DRAFT_TOKENS, EngineName, ServerIdentity, Speculation

if TYPE_CHECKING:  # other tools' files are read without torch, which decoding loads
    from ...calibration.prompts.prompt_file import Prompt
    from ...calibration.recording.decoding import Decoding
    from ...calibration.server_client import ServerClient

T = TypeVar("T")
Fields = Mapping[str, Any]
_Reader = Callable[[Fields, str], T]


class AnswerProblem(Exception):  # noqa: N818 - not an error of its own: protocols turn it into one
    """One thing wrong with an answer, with its field."""


@contextmanager
def reading(where: str, fix: str, before: str = "") -> Iterator[None]:
    """Say where an answer has a wrong form; `before` is put before what is wrong."""
    try:
        yield
    except (AnswerProblem, JsonProblem) as exc:
        raise MeasureError(where, f"{before}{exc}", fix=fix) from exc


def section(fields: Fields, *keys: str) -> Fields:
    """The object that nested keys lead to; empty where there is none."""
    for key in keys:
        value = fields.get(key)
        fields = value if isinstance(value, Mapping) else {}
    return fields


def optional(fields: Fields, key: str, read: _Reader[T]) -> T | None:
    """The result of `read` on a field; None where it is absent or null."""
    return None if fields.get(key) is None else read(fields, key)


def _reader(kind: str, fits: Callable[[Any], bool]) -> Callable[[Fields, str], Any]:
    """Reads a field that holds values of one kind, else AnswerProblem."""

    def read(fields: Fields, key: str) -> Any:
        value = fields.get(key)
        if not fits(value):
            raise AnswerProblem(f"{key}: expected {kind}, got {short(value)}")
        return tuple(value) if isinstance(value, list) else value

    return read


def _is_list(value: object, fits: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


string: _Reader[str] = _reader("text", lambda value: isinstance(value, str))
"""Any text, even an empty one or one of several lines."""
text: _Reader[str] = _reader("text", lambda v: isinstance(v, str) and v != "" and v.isprintable())
"""Printable text that is not empty."""
wholes: _Reader[tuple[int, ...]] = _reader(
    "a list of whole numbers >= 0", lambda v: _is_list(v, lambda i: type(i) is int and i >= 0)
)
"""Token ids or counts, a tuple."""
items: _Reader[tuple[object, ...]] = _reader("a list", _is_list)
objects: _Reader[tuple[Fields, ...]] = _reader(
    "a list of objects", lambda value: _is_list(value, _is_object)
)
object_: _Reader[Fields] = _reader("an object", _is_object)


def whole(fields: Fields, key: str, *, least: int = 0) -> int:
    """A whole number of at least `least`, else AnswerProblem."""
    value = fields.get(key)
    if type(value) is not int or value < least:
        raise AnswerProblem(f"{key}: expected a whole number >= {least}, got {short(value)}")
    return value


def checked_draft_tokens(value: int, where: str) -> int:
    """K, else AnswerProblem: nobody drafts that many tokens, or none."""
    if not 1 <= value <= MOST_DRAFT_TOKENS:
        what = f"expected 1 to {MOST_DRAFT_TOKENS:,} drafted tokens, got {value}"
        raise AnswerProblem(f"{where}: {what}")
    return value


def number(value: object, where: str) -> float:
    """A finite number, else AnswerProblem; an infinite one is null in JSON."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AnswerProblem(f"{where}: expected a number, got {short(value)}")
    return float(value)


def gap(logprobs: Sequence[float]) -> float:
    """The gap between the two most likely tokens; AnswerProblem if there is only one."""
    if len(logprobs) < 2:
        raise AnswerProblem(f"expected at least 2 most likely tokens, got {len(logprobs)}")
    first, second = sorted(logprobs, reverse=True)[:2]
    return first - second


def told(fields: Fields, keys: Sequence[str]) -> dict[str, object]:
    """What a server says about these keys: only plain values, for `ServerIdentity.arguments`."""
    return {key: fields[key] for key in keys if _is_plain(fields.get(key))}


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return value.isprintable()
    return isinstance(value, int | float) and math.isfinite(value)


_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?"
)
_LONGEST_LINE = 10_000  # a search for labels takes the square of it
_LABEL = re.compile(r'\s*(\w+)="((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = re.compile(r"\\(.)")
"""In a label's value: backslash, quotation mark, and n for the end of a line."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Samples by name in the order of the page, each with its labels."""

    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]]

    @classmethod
    def parse(cls, text: str, where: str) -> "Counters":
        """Read an exposition; comments are skipped. MeasureError if a line is not a sample."""
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for line in text.split("\n"):
            if not line.strip() or line.startswith("#"):
                continue
            match = _SAMPLE.fullmatch(line.strip()) if len(line) <= _LONGEST_LINE else None
            value = None if match is None else _number(match["value"])
            if match is None or value is None:
                raise MeasureError(
                    where,
                    f"expected counters of Prometheus, got {short(line)}",
                    fix="give the address of an engine's server",
                )
            pairs = _LABEL.findall(match["labels"] or "")
            labels = {
                name: _ESCAPED.sub(lambda m: "\n" if m[1] == "n" else m[1], value)
                for name, value in pairs
            }
            samples[match["name"]].append((labels, value))
        return cls({name: tuple(entries) for name, entries in samples.items()})

    def total(self, name: str) -> int | None:
        """Sum over all samples of the name; None where the server has no such counter."""
        samples = self.samples.get(name)
        if samples is None:
            return None
        return _whole(value for _, value in samples)

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Sums over all engines, by the value of one label."""
        values: dict[str, list[float]] = defaultdict(list)
        for labels, value in self.samples.get(name, ()):
            values[labels.get(label, "")].append(value)
        return {key: _whole(numbers) for key, numbers in values.items()}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(values: Iterable[float]) -> int:
    """Counters are whole; NaN counts as nothing."""
    return sum(round(value) for value in values if math.isfinite(value))


ARGUMENTS: Mapping[str, Any] = table_beside(__file__, "engines")
"""Keys of a server's configuration that figures depend on; vLLM's by section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What to ask for each prompt; exactly `max_new_tokens`, if `ignore_eos`."""

    decoding: "Decoding"
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


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
"""vLLM's metrics come with the event after the last token, which only this setting requests."""


def sampling(ask: Ask, most: str, least: str, number: type = float) -> dict[str, Any]:
    """Request fields with one name in every engine; `most` and `least` tokens have other names."""
    decoding = ask.decoding
    return {
        most: ask.max_new_tokens,
        "ignore_eos": ask.ignore_eos,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": decoding.top_k,
        # A server takes missing settings from its own defaults, or from the model's
        # generation_config.json (vLLM: entrypoints/openai/completion/protocol.py:322).
        "min_p": number(0),
        "repetition_penalty": number(1),
        "presence_penalty": number(0),
        "frequency_penalty": number(0),
        least: 0,
        "n": 1,
    }


def completion_body(
    model: str, prompt: "Prompt", ask: Ask, extra: Fields, number: type = float
) -> dict[str, Any]:
    """The body for vLLM and TensorRT-LLM at /v1/completions, with an engine's own fields."""
    from ...calibration.recording.decoding import prompt_seed

    decoding = ask.decoding
    asked = sampling(ask, "max_tokens", "min_tokens", number)
    body = {"model": model, "prompt": list(prompt.token_ids), **asked, **extra}
    if decoding.sampled:
        body["seed"] = prompt_seed(decoding.seed, prompt.token_ids)
    if decoding.num_top_logprobs:
        body["logprobs"] = decoding.num_top_logprobs
    return body


def check_length(key: str, count: int, ended: str, ask: Ask, where: str, limit: str) -> None:
    """Refuse more tokens than requested, or fewer where the server's `limit` cut them off."""
    most = ask.max_new_tokens
    if count > most:
        raise AnswerProblem(f"{key}: {count}, but {most} were asked for")
    if ended == "length" and count < most:
        what = f"its answer was cut off after {count} of {most} tokens"
        fix = f"start the server with a {limit}, or ask for fewer tokens"
        raise MeasureError(where, what, fix=fix)


class EngineProtocol(ABC):
    """One engine's interface. It keeps no state except what `identify` found."""

    most_in_flight: int | None = None
    """More requests at a time than this cannot be told apart; None = any number."""

    @abstractmethod
    async def identify(self, client: "ServerClient") -> tuple[ServerIdentity, Speculation | None]:
        """Who answers there, and how it drafts; MeasureError if its drafting cannot be counted."""

    @abstractmethod
    async def complete(self, client: "ServerClient", prompt: "Prompt", ask: Ask) -> Completion:
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
