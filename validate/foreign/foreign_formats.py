"""The content of a file shows which tool wrote it; tables of formats that are read, or refused."""

from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import MeasureError, short
from ...recipes.packages import table_beside
from ...recipes.regular_file import open_stream
from ...recipes.strict_json import JsonProblem, parse_json
from ..measure.measurement_file import read_measurement
from ..measure.server_answers import section
from .benchmark_tools import read_aiperf, read_guidellm
from .engine_files import read_answers, read_sglang_records
from .foreign_measurement import (
    ONE_A_LINE,
    PAGE,
    ForeignMeasurement,
    ForeignPair,
    document_in,
    raw_lines,
)

_PER_REQUEST = (
    "start vLLM with --per-request-spec-decode-metrics detailed and let GuideLLM or AIPerf ask it"
)
_MEASURE = "measure with 'draftquant measure', which keeps the verify steps of every request"


def _is_chunk(answer: Mapping[str, Any]) -> bool:
    """An event of a stream, even as a proxy keeps it; the last one of completions has no choice."""
    inside = answer["data"] if isinstance(answer.get("data"), Mapping) else answer
    kind = str(inside.get("object"))
    return kind.endswith(".chunk") or (kind == "text_completion" and inside.get("choices") == [])


def _is_of_tensorrt_llm(answer: Mapping[str, Any]) -> bool:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    keys = {"avg_decoded_tokens_per_iter", "speculative_decoding"}
    return isinstance(first, Mapping) and not keys.isdisjoint(first)


_SHAPES = {"chunk": _is_chunk, "answer of TensorRT-LLM": _is_of_tensorrt_llm}


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """A row of averages.toml: one kind of result that lacks what a verdict needs."""

    tool: str
    source: str
    holds: str
    switch_on: str = _PER_REQUEST
    lacks: str = "no verify steps of each prompt, so that a change has no bounds"
    shape: str = ""
    all: Sequence[str] = ()
    any: Sequence[str] = ()
    none: Sequence[str] = ()

    def claims(self, document: Mapping[str, Any]) -> bool:
        """Whether a document, or a first line, is of this kind."""
        if self.shape:
            return _SHAPES[self.shape](document)
        keys = document.keys()
        some = not self.any or not keys.isdisjoint(self.any)
        return some and keys >= set(self.all) and keys.isdisjoint(self.none)


AVERAGES = tuple(Average(**row) for row in table_beside(__file__, "averages")["result"])


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """One file of one tool; `claims` recognises it by its first line, or by the whole document."""

    tool: str
    version: str
    read: Callable[[Path], ForeignMeasurement]
    claims: Callable[[Mapping[str, Any]], bool]


_ANSWERS = ("text_completion", "chat.completion")
FORMATS: tuple[ForeignFormat, ...] = (
    ForeignFormat("AIPerf, profile_export.jsonl", "0.13.0", read_aiperf,
           lambda item: "metrics" in item and "session_num" in section(item, "metadata")),
    ForeignFormat("GuideLLM, JSON report", "0.8.1", read_guidellm,
           lambda item: "benchmarks" in item and "guidellm_version" in section(item, "metadata")),
    ForeignFormat("answers of vLLM or SGLang, one to a line", "vLLM 0.32.0, 0.33.0; SGLang 0.5.23",
           read_answers, lambda item: item.get("object") in _ANSWERS
           or item.keys() >= {"custom_id", "response"} or item.keys() >= {"meta_info", "text"}),
    ForeignFormat("request metrics of SGLang", "0.5.23", read_sglang_records,
           lambda item: item.keys() >= {"request_parameters", "prompt_tokens"}),
)  # fmt: skip


def read_foreign_pair(baseline: Path, candidate: Path) -> ForeignPair | None:
    """Two measurements by one tool, None for our own; MeasureError: other tools', or two tools'."""
    paths = (baseline, candidate)
    reader, other = (foreign_format(path) for path in paths)
    for path, known in zip(paths, (reader, other), strict=True):
        first = _first(path) if known is None else None
        if isinstance(first, Mapping | list) and "format" not in first:
            held = "a list" if isinstance(first, list) else f"the keys {short(sorted(first))}"
            raise MeasureError(
                path,
                f"holds {held}: neither 'draftquant measure' nor a tool that is read writes that",
                fix=PAGE,
            )
    if reader is None and other is None:
        return None
    if reader is not None and reader == other:
        return ForeignPair(baseline=reader.read(baseline), candidate=reader.read(candidate))
    for path, known in zip(paths, (reader, other), strict=True):
        if known is None:
            read_measurement(path)  # reports what is wrong if it is not one
    tools = [known.tool if known else "'draftquant measure'" for known in (reader, other)]
    what = f"is of {tools[1]}, and {baseline} is of {tools[0]}: tools count verify steps in"
    fix = "measure both drafts with one tool"
    raise MeasureError(candidate, f"{what} different ways", fix=fix)


def read_foreign(path: Path) -> ForeignMeasurement:
    """What another tool measured."""
    known = foreign_format(path)
    if known is None:
        raise MeasureError(path, "is of no other tool that is known", fix=PAGE)
    return known.read(path)


def foreign_format(path: Path) -> ForeignFormat | None:
    """The tool that wrote a file; None = no other tool that is known."""
    first = _first(path)
    if isinstance(first, Mapping) and "format" in first:
        return None  # of this package
    items = first if isinstance(first, list) else [first]
    if not items or not isinstance(items[0], Mapping):
        return None
    for average in AVERAGES:
        if average.claims(items[0]):
            what = f"is of {average.tool}, which holds {average.holds}: {average.lacks}"
            fix = "; or ".join(filter(None, (average.switch_on, _MEASURE)))
            raise MeasureError(path, what, fix=fix)
    known = next((format_ for format_ in FORMATS if format_.claims(items[0])), None)
    if known is not None and first is not items[0]:
        raise MeasureError(path, f"expected {known.tool}, got a list of them", fix=ONE_A_LINE)
    return known


def _first(path: Path) -> object:
    """The first line, parsed; the whole document where it has several lines; None = neither."""
    try:
        with open_stream(path) as stream:
            lines = raw_lines(stream, path)
            line = next((line for line in lines if line.removeprefix(BOM_UTF8).strip()), b"")
            rest = stream.read(1)
    except OSError:
        return None  # its reader says why
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
