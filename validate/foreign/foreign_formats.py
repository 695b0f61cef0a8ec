"""Which tool wrote a file is known by its content; tables of those that are read, or refused.

Most of those that are refused hold averages alone, of which nobody can say how sure they are: a
mean acceptance length of 2.8 and one of 2.77 may be the same draft on two days, or a loss of 1 %.
"""

from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import MeasureError, short
from ...recipes.regular_file import open_stream
from ...recipes.strict_json import JsonProblem, parse_json
from ..measure.measurement_file import read_measurement
from .benchmark_tools import RAW, is_aiperf, is_guidellm, read_aiperf, read_guidellm
from .engine_files import (
    is_answer,
    is_bench_serve,
    is_sglang_record,
    read_answers,
    read_bench_serve,
    read_sglang_records,
)
from .foreign_measurement import (
    ONE_A_LINE,
    PAGE,
    ForeignMeasurement,
    ForeignPair,
    document_in,
    raw_lines,
)

_MEASURE = "measure with 'draftquant measure', which keeps the verify steps of every request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """One kind of result that lacks what a verdict needs; `source` says where its shape stands."""

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
    """Say of such a result what it lacks, and what to switch on."""
    if not isinstance(document, Mapping):
        return
    for one in AVERAGES:
        if one.claims(document):
            raise MeasureError(
                path,
                f"is of {one.tool}, which holds {one.holds}: {one.lacks}",
                fix="; or ".join(filter(None, (one.switch_on, _MEASURE))),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One file of one tool.

    Attributes:
        tool: and which of its files. version: that was read. run: by which a file is written.
        claims: whether a first line, or a whole document, is of it.
    """

    tool: str
    version: str
    run: str
    claims: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Path], ForeignMeasurement]


FORMATS: tuple[Format, ...] = (
    Format(
        tool="AIPerf, profile_export.jsonl",
        version="0.13.0",
        run=RAW,
        claims=is_aiperf,
        read=read_aiperf,
    ),
    Format(
        tool="GuideLLM, JSON report",
        version="0.8.1",
        run="guidellm run --output kind=json,path=F.json",
        claims=is_guidellm,
        read=read_guidellm,
    ),
    Format(
        tool="answers of vLLM or SGLang, one to a line",
        version="vLLM 0.32.0, 0.33.0; SGLang 0.5.23",
        run="vllm run-batch -i IN.jsonl -o F.jsonl, or answers written by a client",
        claims=is_answer,
        read=read_answers,
    ),
    Format(
        tool="vllm bench serve",
        version="0.32.0, 0.33.0",
        run="vllm bench serve --save-result --save-detailed",
        claims=is_bench_serve,
        read=read_bench_serve,
    ),
    Format(
        tool="request metrics of SGLang",
        version="0.5.23",
        run="launch_server --export-metrics-to-file --export-metrics-to-file-dir DIR",
        claims=is_sglang_record,
        read=read_sglang_records,
    ),
)


def is_foreign(baseline: Path, candidate: Path) -> bool:
    """Whether one of two files is of another tool; MeasureError: nobody is known who writes it."""
    found = [foreign_format(path) for path in (baseline, candidate)]
    for path, one in zip((baseline, candidate), found, strict=True):
        first = _first(path) if one is None else None
        if isinstance(first, Mapping | list) and "format" not in first:
            held = "a list" if isinstance(first, list) else f"the keys {short(sorted(first))}"
            what = f"holds {held}: neither 'draftquant measure' nor a tool that is read writes that"
            raise MeasureError(path, what, fix=PAGE)
    return any(found)


def read_foreign_pair(baseline: Path, candidate: Path) -> ForeignPair:
    """Two measurements by one tool, which is not this package."""
    own, other = foreign_format(baseline), foreign_format(candidate)
    for path, found in ((baseline, own), (candidate, other)):
        if found is None:
            read_measurement(path)  # says what is wrong where it is none
    if own is None or other is None or own != other:
        tools = [one.tool if one else "'draftquant measure'" for one in (own, other)]
        raise MeasureError(
            candidate,
            f"is of {tools[1]}, and {baseline} is of {tools[0]}: tools count verify steps in"
            " different ways",
            fix="measure both drafts with one tool",
        )
    return ForeignPair(baseline=own.read(baseline), candidate=other.read(candidate))


def read_foreign(path: Path) -> ForeignMeasurement:
    """What another tool measured."""
    found = foreign_format(path)
    if found is None:
        raise MeasureError(path, "is of no other tool that is known", fix=PAGE)
    return found.read(path)


def foreign_format(path: Path) -> Format | None:
    """Which tool's a file is; None = no other tool's that is known."""
    first = _first(path)
    if isinstance(first, Mapping) and "format" in first:
        return None  # of this package
    items = first if isinstance(first, list) else [first]
    refuse(path, items[0] if items else None)
    for one in FORMATS:
        if items and isinstance(items[0], Mapping) and one.claims(items[0]):
            if first is not items[0]:
                what = f"expected {one.tool}, got a list of them"
                raise MeasureError(path, what, fix=ONE_A_LINE)
            return one
    return None


def _first(path: Path) -> object:
    """The first line, parsed; the whole document where it has several lines; None = neither."""
    try:
        with open_stream(path) as stream:
            lines = raw_lines(stream, path)
            line = next((one for one in lines if one.removeprefix(BOM_UTF8).strip()), b"")
            rest = stream.read(1)
    except OSError:
        return None  # who reads it says why
    try:
        return parse_json(line.decode("utf-8-sig").removeprefix("data:"))  # an event of a stream
    except (UnicodeDecodeError, JsonProblem):
        if not rest or not line.removeprefix(BOM_UTF8).lstrip().startswith((b"{", b"[")):
            return None
    try:
        return document_in(path)
    except MeasureError as exc:
        raise MeasureError(path, f"is no JSON in lines, nor one document: {exc.what}",
                           fix=f"if it is whole, {ONE_A_LINE}") from exc  # fmt: skip
