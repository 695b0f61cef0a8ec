"""Measurements as files: JSON lines, the setup first, then a record for each prompt, in order.

A file is whole: its records are those of the prompts that the setup names. What is not finished
lies beside it under another name, see `kept`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...recipes.decode import encode
from ...recipes.errors import reason
from ...recipes.regular_file import open_stream
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import MeasureError
from .measurement import Measurement, RequestRecord, Setup
from .measurement_checks import prompts_sha256, record_problem, setup_problem

_LONGEST_LINE = 64 * 2**20  # bytes; 100,000 tokens with log-probabilities have 6 MB
_MOST_BYTES = 2 * 2**30  # 10,000 prompts of 2,000 tokens with log-probabilities have 1.2 GB
_OURS = (
    "give what `draftquant measure` wrote, or measure again; docs/foreign-numbers.md says which"
    " files of other tools are read"
)


def read_measurement(path: Path) -> Measurement:
    """Read a whole measurement; nothing in it is believed unchecked.

    Args:
        path: what `draftquant measure --out` wrote.

    Returns:
        Named as the file.

    Raises:
        MeasureError: it cannot be read, is no measurement or an unfinished one, or a line
            contradicts itself or the setup; names the line.
    """
    lines = numbered_lines(path)
    number, text = next(lines, (1, b""))
    setup = read_setup(text, f"{path}:{number}")
    records = [read_record(text, setup, f"{path}:{number}") for number, text in lines]
    if not records:
        raise MeasureError(path, "holds no record", fix=_OURS)
    found = prompts_sha256((r.id, r.category, r.prompt_sha256) for r in records)
    if found != setup.asked.prompts_sha256:
        doubled = _first_double(records)
        raise MeasureError(
            path,
            f"id {doubled!r} stands on two lines"
            if doubled
            else f"its {len(records)} records are not those of the prompts that were asked",
            fix=_OURS,
        )
    return Measurement(name=path.name, setup=setup, records=tuple(records))


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line with its number, from 1, and with its line end if it has one.

    Raises:
        MeasureError: the file cannot be read, or is longer than any measurement.
    """
    size = number = 0
    try:
        with open_stream(path) as stream:
            while line := stream.readline(_LONGEST_LINE + 1):
                number, size = number + 1, size + len(line)
                if len(line) > _LONGEST_LINE or size > _MOST_BYTES:
                    most = _LONGEST_LINE if len(line) > _LONGEST_LINE else _MOST_BYTES
                    what = f"more than {most:,} bytes, which no measurement has"
                    raise MeasureError(f"{path}:{number}", what, fix=_OURS)
                yield number, line
    except OSError as exc:
        raise MeasureError(path, f"cannot be read: {reason(exc)}", fix=_OURS) from exc


def read_setup(line: bytes, where: str) -> Setup:
    """The first line.

    Raises:
        MeasureError: it is none.
    """
    setup: Setup = _decoded(Setup, line, where)
    if problem := setup_problem(setup):
        raise MeasureError(where, problem, fix=_OURS)
    return setup


def read_record(line: bytes, setup: Setup, where: str) -> RequestRecord:
    """Any other line.

    Raises:
        MeasureError: it is none, or contradicts itself or the setup.
    """
    record: RequestRecord = _decoded(RequestRecord, line, where)
    if problem := record_problem(record, setup):
        raise MeasureError(where, f"prompt {record.id}: {problem}", fix=_OURS)
    return record


def line_of(value: Setup | RequestRecord) -> str:
    """What is written of it, with the line end; pure ASCII."""
    return json.dumps(encode(value)) + "\n"


def _decoded(kind: type, line: bytes, where: str) -> Any:
    try:
        return decode(kind, parse_object(line.decode("utf-8")))
    except (UnicodeDecodeError, JsonProblem) as exc:
        what = "a setup" if kind is Setup else "a record"
        raise MeasureError(where, f"is not {what} of a measurement: {exc}", fix=_OURS) from exc


def _first_double(records: list[RequestRecord]) -> str | None:
    seen: set[str] = set()
    for record in records:
        if record.id in seen:
            return record.id
        seen.add(record.id)
    return None
