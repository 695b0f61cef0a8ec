"""Prometheus counters of verify steps, by engine: their names, and what they count together.

Read in the sources of vLLM 0.32 and 0.33 (v1/spec_decode/metrics.py, SpecDecodingProm), SGLang
0.5.23 (srt/observability/metrics_collector.py, observe_one_finished_request) and TensorRT-LLM
after 1.2 (metrics/collector.py, MetricsCollector; it needs `return_perf_metrics: true`).

SGLang counts verify steps and generated tokens of finished requests, nothing by position. The first
token of a request comes from its prefill, every other one from a verify step, so that tokens less
requests over verify steps is its mean acceptance length, but for tokens of the last step beyond the
end of the text. Its gauge `sglang:spec_accept_length` is of an interval of its log: it cannot be
added up, and keeps its last value while nothing runs. Its tokens and requests have the label
`is_streaming`, each value of which appears with the first such request; its verify steps do not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..measurement import MOST_DRAFT_TOKENS, EngineName
from .counters import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Samples of one name, with these labels; the suffix `_total` is part of the name."""

    name: str
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def total(self, counters: Counters) -> int | None:
        """Sum over all that has these labels; None where nothing has the name."""
        return counters.total(self.name, self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSteps:
    """One reading of the verify steps of a server, since it was started.

    Attributes:
        verify_steps: of all requests.
        accepted: draft tokens that were accepted.
        accepted_at: of them those at each position, from the first; None = not counted.
    """

    verify_steps: int
    accepted: int
    accepted_at: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Where an engine counts its verify steps.

    Attributes:
        path: of the page on its server.
        verify_steps: counter of them.
        accepted_at: counter of accepted draft tokens by position; None = the engine has none.
        position_label: of `accepted_at`; "0" is the first draft token.
        every_position: `accepted_at` has all K positions from the start, also where nothing was
            accepted yet.
        accepted, emitted, first_tokens: accepted draft tokens are `accepted`; where that is None,
            they are `emitted` less `first_tokens` less `verify_steps`.
        drafted: draft tokens that were proposed; None = the engine has no such counter.
        stream_label: by which one server divides some of its counters; "" = none.
        model_label: says which target is served.
    """

    path: str
    verify_steps: Series
    accepted_at: Series | None = None
    position_label: str = ""
    every_position: bool = False
    accepted: Series | None = None
    emitted: Series | None = None
    first_tokens: Series | None = None
    drafted: Series | None = None
    stream_label: str = ""
    model_label: str = "model_name"

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of what a server that has counted a verify step has counted too."""
        every = (self.accepted, self.emitted, self.first_tokens)
        return tuple(one.name for one in every if one is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all counters that `read` looks at."""
        every = (
            self.verify_steps, self.accepted_at, self.accepted, self.emitted, self.first_tokens,
            self.drafted,
        )  # fmt: skip
        return tuple(dict.fromkeys(one.name for one in every if one is not None))

    def read(self, counters: Counters) -> ServerSteps | None:
        """What is counted there; None where the server counts no verify step."""
        steps = self.verify_steps.total(counters)
        if steps is None:
            return None
        at = None
        if self.accepted_at is not None:
            found = counters.by_label(self.accepted_at.name, self.position_label)
            shown = min(self.positions(counters), MOST_DRAFT_TOKENS)
            at = tuple(found.get(str(i), 0) for i in range(shown))
        return ServerSteps(
            verify_steps=steps, accepted=self._accepted(counters, steps, at), accepted_at=at
        )

    def positions(self, counters: Counters) -> int:
        """K as the counters by position show it; 0 where they show none."""
        if self.accepted_at is None:
            return 0
        samples = counters.samples.get(self.accepted_at.name, ())
        shown = (labels.get(self.position_label, "") for labels, _ in samples)
        return max((int(one) + 1 for one in shown if _POSITION.fullmatch(one)), default=0)

    def _accepted(self, counters: Counters, steps: int, accepted_at: tuple[int, ...] | None) -> int:
        if self.accepted is not None:
            return self.accepted.total(counters) or 0
        if self.emitted is None or self.first_tokens is None:
            return sum(accepted_at or ())
        emitted, first = self.emitted.total(counters), self.first_tokens.total(counters)
        return max(0, (emitted or 0) - (first or 0) - steps)


ENGINE_COUNTERS: Mapping[EngineName, EngineCounters] = {
    "vllm": EngineCounters(
        path="/metrics",
        verify_steps=Series(name="vllm:spec_decode_num_drafts_total"),
        accepted_at=Series(name="vllm:spec_decode_num_accepted_tokens_per_pos_total"),
        position_label="position",
        every_position=True,
        accepted=Series(name="vllm:spec_decode_num_accepted_tokens_total"),
        drafted=Series(name="vllm:spec_decode_num_draft_tokens_total"),
    ),
    "sglang": EngineCounters(
        path="/metrics",
        verify_steps=Series(name="sglang:spec_verify_calls_total"),
        emitted=Series(name="sglang:generation_tokens_total"),
        first_tokens=Series(name="sglang:num_requests_total"),
        stream_label="is_streaming",
    ),
    "tensorrt-llm": EngineCounters(
        path="/prometheus/metrics",
        verify_steps=Series(
            name="trtllm_spec_decode_drafted_tokens_total", labels={"token_position": "0"}
        ),
        accepted_at=Series(name="trtllm_spec_decode_accepted_tokens_total"),
        position_label="token_position",
        drafted=Series(name="trtllm_spec_decode_drafted_tokens_total"),
    ),
}
"""A step of TensorRT-LLM drafts its first position whenever it drafts."""
_POSITION = re.compile("[0-9]{1,9}")
