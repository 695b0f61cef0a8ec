"""Files of other tools: JSON or JSON lines, of which each value is checked where it is read."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ...recipes.errors import reason, short
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, parse_json, parse_object
from ..errors import MeasureError
from ..measure.protocols.answer_fields import (
    AnswerProblem,
    Fields,
    checked_draft_tokens,
    whole,
    wholes,
)

_MOST_BYTES = 512 * 2**20  # of a file of lines
_PIECE = 1 << 16  # bytes of a line that are looked at together
_LONGEST_LINE = 64 * 2**20  # bytes, of a document too: 10,000 requests of GuideLLM have 54 MB
PAGE = "docs/foreign-numbers.md says what is read of each tool, and how it is run for that"
ONE_A_LINE = "write each object on one line: jq -c 'arrays[], objects' FILE > FILE.jsonl"


@contextmanager
def reading(where: str, fix: str = PAGE) -> Iterator[None]:
    """Says where something is not as the tool writes it.

    Raises:
        MeasureError: an `AnswerProblem` or a `JsonProblem` was raised inside.
    """
    try:
        yield
    except (AnswerProblem, JsonProblem) as exc:
        raise MeasureError(where, str(exc), fix=fix) from exc


def document_in(path: Path) -> object:
    """The one JSON document in a file.

    Raises:
        MeasureError: it cannot be read, or is none.
    """
    try:
        text = read_text(path, _LONGEST_LINE)
    except OSError as exc:
        raise MeasureError(path, f"cannot be read: {reason(exc)}", fix=PAGE) from exc
    with reading(str(path)):
        return parse_json(text)


def object_in(path: Path) -> Fields:
    """The one JSON object in a file.

    Raises:
        MeasureError: it cannot be read, or is none.
    """
    found = document_in(path)
    if not isinstance(found, Mapping):
        raise MeasureError(path, f"expected a JSON object, got {short(found)}", fix=PAGE)
    return found


def raw_lines(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """Every line of a file as it is.

    Raises:
        MeasureError: one of them, or all together, are longer than any that is read.
    """
    size = 0
    while length := _length_of_line(stream):
        size += length
        for most, found, what in ((_LONGEST_LINE, length, "a line"), (_MOST_BYTES, size, "it")):
            if found > most:
                raise MeasureError(path, f"{what} has more than {most:,} bytes", fix=PAGE)
        yield stream.readline(length)


def _length_of_line(stream: BinaryIO) -> int:
    """Bytes of the next line, which is not held; of one that is too long not all are counted."""
    start, length = stream.tell(), 0
    while length <= _LONGEST_LINE and (piece := stream.readline(_PIECE)):
        length += len(piece)
        if piece.endswith(b"\n"):
            break
    stream.seek(start)
    return length


def lines_of(path: Path) -> Iterator[tuple[str, Fields]]:
    """Every line that is not empty, parsed, with its place in words.

    Raises:
        MeasureError: the file cannot be read, or a line is no JSON object.
    """
    try:
        with open_stream(path) as stream:
            for number, line in enumerate(raw_lines(stream, path), 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                with reading(where, f"is the file whole? Copy it again; or {ONE_A_LINE}"):
                    yield where, parse_object(_text(line))
    except OSError as exc:
        raise MeasureError(path, f"cannot be read: {reason(exc)}", fix=PAGE) from exc


def optional(fields: Fields, key: str, read: Callable[[Fields, str], Any]) -> Any:
    """What `read` makes of a field; None where it is absent or null."""
    return None if fields.get(key) is None else read(fields, key)


def string(fields: Fields, key: str) -> str:
    """Any text, also an empty one, also of several lines.

    Raises:
        AnswerProblem: it is none.
    """
    value = fields.get(key)
    if not isinstance(value, str):
        raise AnswerProblem(f"{key}: expected text, got {short(value)}")
    return value


def vllm_verify_steps(metrics: Fields) -> tuple[int, tuple[int, ...]]:
    """K, and the histogram of what vLLM calls `speculative_decoding`, checked against its sums.

    Source: `RequestSpecDecodeMetrics.to_dict` in vllm/v1/metrics/stats.py, 0.32.0 and 0.33.0.

    Raises:
        AnswerProblem: it contradicts itself.
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
    """K, and the histogram of what SGLang calls `spec_*`, up to the largest number seen.

    A request of one token has no verify step: K is then 0.

    Source: SGLang 0.5.23, `srt/managers/tokenizer_manager.py`, `_calculate_spec_decoding_metrics`.

    Raises:
        AnswerProblem: it is absent, or contradicts itself.
    """
    if num_tokens <= 1 and "spec_verify_ct" not in told:
        return 0, (0,)
    steps = whole(told, "spec_verify_ct", least=1)
    counts = wholes(told, "spec_correct_drafts_histogram")
    proposed = whole(told, "spec_num_proposed_drafts", least=1)
    keys = ("spec_verify_ct", "spec_num_correct_drafts")
    _check_totals(told, keys, counts, "spec_correct_drafts_histogram")
    if proposed % steps:
        raise AnswerProblem(
            f"spec_num_proposed_drafts: {proposed} of {steps} verify steps: K changes, which no"
            " verdict compares (--speculative-adaptive)"
        )
    most = checked_draft_tokens(proposed // steps, "spec_num_proposed_drafts")
    if len(counts) > most + 1:
        raise AnswerProblem(
            f"spec_correct_drafts_histogram: {len(counts)} counts, expected at most {most + 1} for"
            f" K = {most}"
        )
    return most, counts


def check_finished(finish_reason: object) -> None:
    """A request was neither cancelled nor ended by an error; SGLang says it in an object.

    Raises:
        AnswerProblem: it was.
    """
    kind = finish_reason.get("type") if isinstance(finish_reason, Mapping) else finish_reason
    if kind in ("abort", "error"):
        raise AnswerProblem(
            f"finish_reason: the request failed or was cancelled: {short(finish_reason)}"
        )


def check_sums(metrics: Fields, histogram: tuple[int, ...]) -> None:
    """What vLLM and AIPerf count of one request agrees with its histogram.

    Raises:
        AnswerProblem: it does not.
    """
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
    """The verify steps and the accepted tokens that a file tells are those of its histogram."""
    totals = sum(counts), sum(j * count for j, count in enumerate(counts))
    for key, value in zip(keys, totals, strict=True):
        if whole(told, key) != value:
            raise AnswerProblem(f"{key}: expected {value} by {by}, got {told[key]}")
