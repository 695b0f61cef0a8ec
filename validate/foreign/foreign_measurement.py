"""What another tool's benchmark measured of one draft, request by request."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from ...recipes.errors import MeasureError, short
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, parse_json, parse_object
from ...recipes.strict_json import reading as reading_file
from ..counting.acceptance_counts import AcceptanceCounts, PromptKey
from ..counting.draft_counts import PromptCounts
from ..measure.server_answers import (
    AnswerProblem,
    Fields,
    checked_draft_tokens,
    optional,
    reading,
    whole,
    wholes,
)

_NOT_THE_PROMPT = ("model", "stream", "stream_options", "rid", "request_id", "user")
"""Keys of a request that do not affect what is generated, or that name the server."""
_PROMPTS = ("prompt", "messages", "text", "input_ids", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRequest(PromptKey):
    """What one request got, [K + 1] histogram; None = the tool does not record it."""

    category: str = "all"
    settings: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    num_output_tokens: int | None
    output: str | None
    histogram: tuple[int, ...]
    cluster: str = ""

    @property
    def counts(self) -> AcceptanceCounts:
        """Counts of its verify steps."""
        return AcceptanceCounts(histogram=self.histogram)

    @property
    def prompt(self) -> PromptCounts:
        """The prompt as the gate counts it."""
        return PromptCounts.of(self, self.counts, self.cluster, self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignMeasurement:
    """All requests of one run, in the tool's order; "" = the file does not say.

    Attributes:
        paired_by: what identifies a request on another server, in words.
        to_keep_outputs: how to make the tool keep the texts of outputs.
    """

    name: str
    tool: str
    engine: str
    version: str = ""
    model: str = ""
    num_draft_tokens: int
    paired_by: str
    to_keep_outputs: str
    requests: tuple[ForeignRequest, ...]

    @property
    def temperature(self) -> float | None:
        """The temperature of all requests; None where it is not known."""
        told = [request.settings for request in self.requests]
        values = [s["temperature"] for s in told if s.get("temperature") is not None]
        known = {float(value) for value in values if isinstance(value, int | float)}
        return known.pop() if len(known) == 1 else None

    @property
    def has_outputs(self) -> bool:
        """True if every request has its text."""
        return all(request.output is not None for request in self.requests)

    @property
    def has_lengths(self) -> bool:
        """True if every request has the number of its output tokens."""
        return all(request.num_output_tokens is not None for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPair:
    """Two runs: of the draft as released (BF16), and of the quantized draft."""

    baseline: ForeignMeasurement
    candidate: ForeignMeasurement


def sha256_of(value: object) -> str:
    """Identity of any JSON value."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def asked(payload: Fields, problem: str) -> tuple[str, Mapping[str, object]]:
    """Identity of the prompt of a request that was sent, and its settings, else AnswerProblem."""
    prompt = {key: payload[key] for key in _PROMPTS if payload.get(key) is not None}
    if not prompt:
        raise AnswerProblem(problem)
    named = (*_PROMPTS, *_NOT_THE_PROMPT)
    rest = ((key, value) for key, value in payload.items() if key not in named)
    return sha256_of(prompt), {key: value for key, value in rest if value is not None}


def with_k(
    path: Path, told: Sequence[tuple[ForeignRequest, int]]
) -> tuple[int, tuple[ForeignRequest, ...]]:
    """The one K of all requests (0 = no step says it), and their histograms with K + 1 columns."""
    sizes = {most for _, most in told if most}
    if len(sizes) != 1:
        raise MeasureError(
            path,
            f"expected one K in all requests, got {sorted(sizes)}",
            fix="keep the requests of one server with one K in a file",
        )
    (most,) = sizes
    wider = ((r, (*r.histogram, *(0,) * (most + 1 - len(r.histogram)))) for r, _ in told)
    return most, tuple(dataclasses.replace(r, histogram=counts) for r, counts in wider)


def with_copies_together(
    requests: Sequence[ForeignRequest], num_prompt_tokens: Sequence[int | None]
) -> tuple[ForeignRequest, ...]:
    """Requests with unknown prompts: those with equal length and output are one cluster."""
    both = list(zip(requests, num_prompt_tokens, strict=True))
    alike = Counter((request.output, length) for request, length in both)
    first: dict[tuple[str | None, int | None], str] = {}
    return tuple(
        request
        if length is None or request.output is None or alike[request.output, length] == 1
        else dataclasses.replace(
            request, cluster=first.setdefault((request.output, length), request.prompt_sha256)
        )
        for request, length in both
    )


_MOST_BYTES = 512 * 2**20  # of a file of lines
_LONGEST_LINE = 64 * 2**20  # bytes, of a document too: 10,000 requests of GuideLLM have 54 MB
PAGE = "docs/servers.md says what is read of each tool, and how it is run for that"
ONE_A_LINE = "write each object on one line: jq -c 'arrays[], objects' FILE > FILE.jsonl"


def document_in(path: Path) -> object:
    """The one JSON document in a file, else MeasureError."""
    with reading_file(path, MeasureError, PAGE):
        return parse_json(read_text(path, _LONGEST_LINE))


def object_in(path: Path) -> Fields:
    """The one JSON object in a file, else MeasureError."""
    document = document_in(path)
    if not isinstance(document, Mapping):
        raise MeasureError(path, f"expected a JSON object, got {short(document)}", fix=PAGE)
    return document


def raw_lines(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """Every line of a file, unchanged; MeasureError: one, or all together, are too long."""
    size = 0
    while line := stream.readline(_LONGEST_LINE + 1):
        size += len(line)
        for most, length, what in ((_LONGEST_LINE, len(line), "a line"), (_MOST_BYTES, size, "it")):
            if length > most:
                raise MeasureError(path, f"{what} has more than {most:,} bytes", fix=PAGE)
        yield line


def lines_of(path: Path) -> Iterator[tuple[str, Fields]]:
    """Every line that is not empty, parsed as a JSON object, with its place in words."""
    with reading_file(path, MeasureError, PAGE), open_stream(path) as stream:
        for number, line in enumerate(raw_lines(stream, path), 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            with reading(where, f"is the file whole? Copy it again; or {ONE_A_LINE}"):
                yield where, parse_object(_text(line))


def vllm_verify_steps(metrics: Fields) -> tuple[int, tuple[int, ...]]:
    """K, and the histogram of what vLLM calls `speculative_decoding`, checked against its sums.

    Source: `RequestSpecDecodeMetrics.to_dict` in vllm/v1/metrics/stats.py, 0.32.0 and 0.33.0.
    """
    most = whole(metrics, "num_spec_tokens", least=1)
    histogram = wholes(metrics, "acceptance_histogram")
    if len(histogram) != most + 1:
        raise AnswerProblem(
            f"acceptance_histogram: expected {most + 1} counts for num_spec_tokens = {most}, got"
            f" {short(list(histogram))}"
        )
    check_sums(metrics, histogram)
    return most, histogram


def sglang_verify_steps(told: Fields, num_tokens: int) -> tuple[int, tuple[int, ...]]:
    """K, 0 where one token needed no verify step, and the histogram up to the largest number seen.

    Source: `_calculate_spec_decoding_metrics` in srt/managers/tokenizer_manager.py, SGLang 0.5.23.
    """
    if num_tokens <= 1 and "spec_verify_ct" not in told:
        return 0, (0,)
    key = "spec_correct_drafts_histogram"
    counts = wholes(told, key)
    most = constant_k(told, "spec_num_proposed_drafts", "spec_verify_ct")
    _check_totals(told, ("spec_verify_ct", "spec_num_correct_drafts"), counts, key)
    if len(counts) > most + 1:
        raise AnswerProblem(
            f"{key}: {len(counts)} counts, expected at most {most + 1} for K = {most}"
        )
    return most, counts


def constant_k(told: Fields, drafted: str, steps: str) -> int:
    """K, if all verify steps may have drafted as many; else AnswerProblem."""
    proposed, number = whole(told, drafted, least=1), whole(told, steps, least=1)
    if proposed % number:
        raise AnswerProblem(
            f"{drafted}: {proposed} of {number} verify steps: K changes, which no verdict compares"
            " (--speculative-adaptive)"
        )
    return checked_draft_tokens(proposed // number, drafted)


def check_finished(finish_reason: object) -> None:
    """AnswerProblem if a request was cancelled or failed; SGLang says so in an object."""
    kind = finish_reason.get("type") if isinstance(finish_reason, Mapping) else finish_reason
    if kind in ("abort", "error"):
        raise AnswerProblem(
            f"finish_reason: the request failed or was cancelled: {short(finish_reason)}"
        )


def check_sums(metrics: Fields, histogram: tuple[int, ...]) -> None:
    """AnswerProblem if vLLM's or AIPerf's counts for one request disagree with its histogram."""
    keys = ("num_spec_steps", "num_accepted_draft_tokens")
    _check_totals(metrics, keys, histogram, "acceptance_histogram")
    steps = optional(metrics, "per_step_accepted", wholes)
    if steps is not None and [steps.count(j) for j in range(len(histogram))] != [*histogram]:
        raise AnswerProblem(
            f"per_step_accepted: {len(steps)} verify steps are not those of acceptance_histogram"
        )


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise JsonProblem(f"not UTF-8: {exc.reason} at byte {exc.start}") from exc


def _check_totals(told: Fields, keys: tuple[str, str], counts: tuple[int, ...], by: str) -> None:
    totals = sum(counts), sum(j * count for j, count in enumerate(counts))
    for key, value in zip(keys, totals, strict=True):
        if whole(told, key) != value:
            raise AnswerProblem(f"{key}: expected {value} by {by}, got {told[key]}")
