"""Results that lack what a verdict needs: recognized, so that the refusal says what to switch on.

Most hold averages alone, of which nobody can say how sure they are: a mean acceptance length of 2.8
and one of 2.77 may be the same draft on two days, or a loss of 1 %.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MeasureError

_MEASURE = "measure with 'draftquant measure', which keeps the verify steps of every request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """One kind of result.

    Attributes:
        tool: and which of its files; source: where its shape stands.
        claims: whether a document, or a first line, is one.
        holds: what it has instead of verify steps of requests.
        switch_on: by what the tool, or its server, keeps them; "" = by nothing.
        lacks: what a verdict needs.
    """

    tool: str
    source: str
    claims: Callable[[Mapping[str, Any]], bool]
    holds: str
    switch_on: str
    lacks: str = "no verify steps of each prompt, so that a change has no bounds"


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda document: all(key in document for key in keys)


def _is_chunk(answer: Mapping[str, Any]) -> bool:
    """An event of a stream, also as a proxy keeps it; the last one of completions has no choice."""
    inside = answer["data"] if isinstance(answer.get("data"), Mapping) else answer
    kind = str(inside.get("object"))
    return kind.endswith(".chunk") or (kind == "text_completion" and inside.get("choices") == [])


def _is_of_tensorrt_llm(answer: Mapping[str, Any]) -> bool:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    keys = {"avg_decoded_tokens_per_iter", "speculative_decoding"}
    return isinstance(first, Mapping) and not keys.isdisjoint(first)


_DETAILED = "start vLLM with --per-request-spec-decode-metrics detailed"
_ASKED = f"{_DETAILED} and let GuideLLM or AIPerf ask it"

AVERAGES: tuple[Average, ...] = (
    Average(
        tool="SGLang bench_serving",
        source="SGLang 0.5.23, benchmark/serving.py",
        claims=_has("accept_length", "backend", "random_range_ratio"),
        holds="accept_length, the average of the server since it was started",
        switch_on="start SGLang with --export-metrics-to-file --export-metrics-to-file-dir DIR, run"
        " bench_serving with --return-logprob, and give the file in DIR",
    ),
    Average(
        tool="SGLang bench_one_batch_server",
        source="SGLang 0.5.23, benchmark/one_batch_server.py",
        claims=_has("acc_length", "last_gen_throughput"),
        holds="acc_length, the average of the server since it was started",
        switch_on="start SGLang with --export-metrics-to-file --export-metrics-to-file-dir DIR, and"
        " give the file in DIR",
    ),
    Average(
        tool="AIPerf (profile_export_aiperf.json)",
        source="AIPerf 0.13.0, exporters/metrics_json_exporter.py",
        claims=_has("aiperf_version", "input_config"),
        holds="averages and percentiles over requests",
        switch_on="give profile_export.jsonl beside it (aiperf profile --export-level raw), with"
        " vLLM started with --per-request-spec-decode-metrics detailed",
    ),
    Average(
        tool="vllm bench serve without --save-detailed",
        source="vLLM 0.33.0, benchmarks/serve.py",
        claims=lambda found: (
            _has("model_id", "num_prompts", "backend")(found) and "itls" not in found
        ),
        holds="sums over all requests (spec_decode_num_drafts and others)",
        switch_on="run vllm bench serve with --save-result --save-detailed",
    ),
    Average(
        tool="Model-Optimizer specdec_bench",
        source="Model-Optimizer, examples/specdec_bench/specdec_bench/speculation_profile.py and"
        " metrics/acceptance_rate.py",
        claims=lambda found: (
            "marginal_accept_rates" in found or "Acceptance_Length_Histogram" in found
        ),
        holds="rates and one histogram over all prompts",
        switch_on=_ASKED,
    ),
    Average(
        tool="NeMo Automodel bench_vllm or bench_sglang",
        source="NeMo Automodel, nemo_automodel/components/speculative/bench_sglang.py",
        claims=_has("accept_length", "acceptance_rate"),
        holds="accept_length, the average of all prompts",
        switch_on=_ASKED,
    ),
    Average(
        tool="a stream of answers",
        source="vLLM 0.33.0 and SGLang 0.5.23, entrypoints/openai; llama-swap#1032 keeps its last",
        claims=_is_chunk,
        holds="single events",
        switch_on=f"{_DETAILED}, ask without streaming, with return_token_ids: true, and write each"
        " answer as one line",
        lacks="neither the whole output, nor which prompt it belongs to",
    ),
    Average(
        tool="TensorRT-LLM's server (answers)",
        source="AIPerf#1433 and TensorRT-LLM#19311, which are in no release",
        claims=_is_of_tensorrt_llm,
        holds="an average of each answer, or counts beside its text in a form of no release",
        switch_on="",
        lacks="nothing that says which prompt was answered, and how each verify step went",
    ),
)


def refuse(path: Path, document: object) -> None:
    """Say of such a result what it lacks.

    Raises:
        MeasureError: it is one.
    """
    if not isinstance(document, Mapping):
        return
    for one in AVERAGES:
        if one.claims(document):
            raise MeasureError(
                path,
                f"is of {one.tool}, which holds {one.holds}: {one.lacks}",
                fix="; or ".join(filter(None, (one.switch_on, _MEASURE))),
            )
