"""Counters of a server in Prometheus' text format, and where each engine counts its verify steps.

Read in the sources of vLLM 0.32 and 0.33 (v1/spec_decode/metrics.py, SpecDecodingProm), SGLang
0.5.23 (srt/observability/metrics_collector.py, observe_one_finished_request) and TensorRT-LLM after
1.2 (metrics/collector.py, MetricsCollector; it needs `return_perf_metrics: true`).

SGLang counts verify steps and generated tokens of finished requests, nothing by position. The first
token of a request comes from its prefill, every other one from a verify step, so that tokens less
requests over verify steps is its mean acceptance length, but for tokens of the last step beyond the
end of the text. Its gauge `sglang:spec_accept_length` is of an interval of its log: it cannot be
added up, and keeps its last value while nothing runs.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ...recipes.errors import MeasureError, short
from .measurement import EngineName

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
        """Read an exposition; comments are skipped. MeasureError: a line is no sample."""
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for line in text.split("\n"):
            if not line.strip() or line.startswith("#"):
                continue
            match = _SAMPLE.fullmatch(line.strip()) if len(line) <= _LONGEST_LINE else None
            value = None if match is None else _number(match["value"])
            if match is None or value is None:
                raise MeasureError(where, f"expected counters of Prometheus, got {short(line)}",
                                   fix="give the address of an engine's server")  # fmt: skip
            found = _LABEL.findall(match["labels"] or "")
            labels = {name: _ESCAPED.sub(_unescaped, value) for name, value in found}
            samples[match["name"]].append((labels, value))
        return cls({name: tuple(found) for name, found in samples.items()})

    def total(self, name: str) -> int | None:
        """Sum over all that has the name; None where the server has no such counter."""
        found = self.samples.get(name)
        if found is None:
            return None
        return _whole(value for _, value in found)

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Sums over all engines, by the value of one label."""
        values: dict[str, list[float]] = defaultdict(list)
        for labels, value in self.samples.get(name, ()):
            values[labels.get(label, "")].append(value)
        return {key: _whole(found) for key, found in values.items()}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(values: Iterable[float]) -> int:
    """Counters are whole; what is no number counts nothing."""
    return sum(round(value) for value in values if math.isfinite(value))


MODEL_LABEL = "model_name"
"""Says which target is served, in the counters of every engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Samples of one name, with these labels; the suffix `_total` is part of the name."""

    name: str
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Where an engine counts its verify steps.

    Attributes:
        accepted_at: counter of accepted draft tokens by position; None = the engine has none.
        position_label: of `accepted_at`; "0" is the first draft token.
        accepted, emitted, first_tokens: accepted draft tokens are `accepted`; where that is None,
            they are `emitted` less `first_tokens` less `verify_steps`.
    """

    verify_steps: Series
    accepted_at: Series | None = None
    position_label: str = ""
    accepted: Series | None = None
    emitted: Series | None = None
    first_tokens: Series | None = None


ENGINE_COUNTERS: Mapping[EngineName, EngineCounters] = {
    "vllm": EngineCounters(
        verify_steps=Series(name="vllm:spec_decode_num_drafts_total"),
        accepted_at=Series(name="vllm:spec_decode_num_accepted_tokens_per_pos_total"),
        position_label="position",
        accepted=Series(name="vllm:spec_decode_num_accepted_tokens_total"),
    ),
    "sglang": EngineCounters(
        verify_steps=Series(name="sglang:spec_verify_calls_total"),
        emitted=Series(name="sglang:generation_tokens_total"),
        first_tokens=Series(name="sglang:num_requests_total"),
    ),
    "tensorrt-llm": EngineCounters(
        verify_steps=Series(
            name="trtllm_spec_decode_drafted_tokens_total", labels={"token_position": "0"}
        ),
        accepted_at=Series(name="trtllm_spec_decode_accepted_tokens_total"),
        position_label="token_position",
    ),
}
"""A step of TensorRT-LLM drafts its first position whenever it drafts."""
