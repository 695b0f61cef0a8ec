"""Prometheus counters of verify steps, by engine: their names, and what they count together.

Read in the sources of vLLM 0.32 and 0.33 (v1/spec_decode/metrics.py, SpecDecodingProm), SGLang
0.5.23 (srt/observability/metrics_collector.py, observe_one_finished_request) and TensorRT-LLM
after 1.2 (metrics/collector.py, MetricsCollector; it needs `return_perf_metrics: true`).

SGLang counts verify steps and generated tokens of finished requests, nothing by position. The first
token of a request comes from its prefill, every other one from a verify step, so that tokens less
requests over verify steps is its mean acceptance length, but for tokens of the last step beyond the
end of the text. Its gauge `sglang:spec_accept_length` is of an interval of its log: it cannot be
added up, and keeps its last value while nothing runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..measurement import EngineName
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
        accepted, emitted, first_tokens: accepted draft tokens are `accepted`; where that is None,
            they are `emitted` less `first_tokens` less `verify_steps`.
        drafted: draft tokens that were proposed; None = the engine has no such counter.
        model_label: says which target is served.
    """

    path: str
    verify_steps: Series
    accepted_at: Series | None = None
    position_label: str = ""
    accepted: Series | None = None
    emitted: Series | None = None
    first_tokens: Series | None = None
    drafted: Series | None = None
    model_label: str = "model_name"

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
            last = max((int(key) for key in found if key.isdecimal()), default=-1)
            at = tuple(found.get(str(i), 0) for i in range(last + 1))
        return ServerSteps(
            verify_steps=steps, accepted=self._accepted(counters, steps, at), accepted_at=at
        )

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
        accepted=Series(name="vllm:spec_decode_num_accepted_tokens_total"),
        drafted=Series(name="vllm:spec_decode_num_draft_tokens_total"),
    ),
    "sglang": EngineCounters(
        path="/metrics",
        verify_steps=Series(name="sglang:spec_verify_calls_total"),
        emitted=Series(name="sglang:generation_tokens_total"),
        first_tokens=Series(name="sglang:num_requests_total"),
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
