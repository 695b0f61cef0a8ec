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
        verify_steps: counter of them.
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
