"""Measurement files: what is written is read, and what cannot be is refused with its line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftquant.recipes.errors import MeasureError
from draftquant.validate.measure import measurement_file
from draftquant.validate.measure.measurement import (
    Asked,
    Measurement,
    RequestRecord,
    ServerIdentity,
    Setup,
    Speculation,
    prompts_sha256,
)
from draftquant.validate.measure.measurement_file import line_of, read_measurement

RECORDS = tuple(
    RequestRecord(
        id=f"p{i}",
        category="code",
        prompt_sha256=f"{i:064x}",
        num_prompt_tokens=4,
        token_ids=(7, 8, 9),
        ended="length",
        histogram=(1, 0, 1),
        accepted=(2, 0),
        drafted=(2, 1),
        token_logprob=(-0.5, -0.25, 0.0),
        top_gap=(0.0, 1.0, 2.5),
        began=0.5 * i,
        time_to_first_token=0.1,
        latency=0.3,
    )
    for i in range(3)
)
SETUP = Setup(
    server=ServerIdentity(
        engine="vllm", version="0.32.0", model="m", arguments={"a": {"b": [1, None, "x"]}}
    ),
    speculation=Speculation(num_draft_tokens=2, lossy=("x = 1",)),
    asked=Asked(
        prompts_sha256=prompts_sha256((r.id, r.category, r.prompt_sha256) for r in RECORDS),
        max_new_tokens=3,
        concurrency=2,
        num_top_logprobs=2,
    ),
    draftquant="0.1.0",
)


def write(folder: Path, setup: Setup = SETUP, records: tuple[RequestRecord, ...] = RECORDS) -> Path:
    path = folder / "r"
    path.write_text("".join(map(line_of, (setup, *records))), encoding="utf-8")
    return path


def edited(folder: Path, line: int, key: str, value: object) -> Path:
    """With another value, or without the key for `...`, in a line from 1."""
    path = write(folder)
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    at = lines[line - 1]
    *outer, last = key.split(".")
    for name in outer:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """With speculation and log-probabilities, and without."""
    assert read_measurement(write(tmp_path)) == Measurement(name="r", setup=SETUP, records=RECORDS)
    none: dict[str, Any] = dict.fromkeys(
        ("histogram", "accepted", "drafted", "token_logprob", "top_gap", "time_to_first_token")
    )
    records = tuple(replace(record, **none) for record in RECORDS)
    setup = replace(SETUP, speculation=None, asked=replace(SETUP.asked, num_top_logprobs=0))
    found = read_measurement(write(tmp_path, setup, records))
    assert (found.setup, found.records, found.records[0].counts) == (setup, records, None)
    assert line_of(replace(RECORDS[0], id="\u00e9\u2028")).isascii()


BAD: tuple[tuple[int, str, object, str], ...] = (
    (1, "format", "x", "format: expected 'draftquant measurement'"),
    (1, "format", ..., "format: missing key"),
    (1, "server.version", "", "server.version: expected printable"),
    (1, "server.model", "a\x1b", r"server.model: expected printable characters"),
    (1, "speculation.num_draft_tokens", 0, "num_draft_tokens: expected 1 to 1,024"),
    (1, "speculation.draft_sha256", "x", "draft_sha256: expected 64 hex digits"),
    (1, "asked.temperature", float("nan"), "temperature: expected a finite number"),
    (2, "id", "a\nb", "prompt a.nb: id: expected 1 to 200 printable characters"),
    (2, "category", "", "category: expected 1 to 200 printable"),
    (2, "token_ids", [7, 8], "asked for 3 tokens, got 2 and 'length'"),
    (2, "token_ids", [7] * 4, "asked for 3 tokens, got 4"),
    (2, "token_ids", [7, 8, 2**31], r"token_ids: expected ids in \[0, 2147483647\]"),
    (2, "token_ids", [True], r"token_ids\[0\]: expected int, got True"),
    (2, "histogram", None, "histogram: expected verify steps, because the server"),
    (2, "histogram", [1, 1], "histogram: expected 3 counts for K = 2"),
    (2, "histogram", [2, -1, 1], "none below 0"),
    (2, "histogram", [1, 1, 1], "2 verify steps do not match the histogram"),
    (2, "accepted", [2, 1], "2 verify steps do not match the histogram"),
    (2, "accepted", [2, 0, 3], "3 verify steps do not match the histogram"),
    (2, "accepted", None, "drafted: expected none without accepted"),
    (2, "drafted", [2], "drafted: expected 2 verify steps, got 1"),
    (2, "drafted", [1, 1], "drafted: expected between the accepted"),
    (2, "drafted", [3, 1], "drafted: expected between the accepted"),
    (2, "token_logprob", None, "token_logprob: asked for, got none"),
    (2, "token_logprob", [0, 0, 0.5], "token_logprob: expected logarithms"),
    (2, "top_gap", [0.0], "top_gap: expected 3 numbers"),
    (2, "top_gap", [0, 0, -0.5], "top_gap: expected differences"),
    (2, "latency", float("inf"), "latency: expected a finite number"),
    (2, "time_to_first_token", 0.4, "0.4 seconds are more than the latency"),
)  # fmt: skip


def test_what_cannot_be_is_refused_with_its_line(tmp_path: Path) -> None:
    for line, key, value, problem in BAD:
        path = edited(tmp_path, line, key, value)
        with pytest.raises(MeasureError, match=problem) as found:
            read_measurement(path)
        assert found.value.where == f"{path}:{line}"


def test_what_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    for key, value, problem in (
        ("asked.num_top_logprobs", 0, "token_logprob: expected none, because none were asked"),
        ("speculation", None, "histogram: expected none, because the server uses"),
    ):
        with pytest.raises(MeasureError, match=problem):
            read_measurement(edited(tmp_path, 1, key, value))
    stopped = tuple(replace(record, ended="stop") for record in RECORDS)
    path = write(tmp_path, replace(SETUP, asked=replace(SETUP.asked, ignore_eos=True)), stopped)
    with pytest.raises(MeasureError, match="asked for 3 tokens whatever they are, got 3 and 'st"):
        read_measurement(path)


LINES: tuple[tuple[Callable[[list[str]], list[str]], str], ...] = (
    (lambda lines: lines[:-1], "r: its 2 records are not those of the"),
    (lambda lines: [lines[0], *lines[:0:-1]], "r: its 3 records are not those"),
    (lambda lines: [*lines, lines[1]], "r: id 'p0' stands on two lines"),
    (lambda lines: lines[:1], "r: holds no record"),
    (lambda _: [], "r:1: is not a setup of a measurement: not JSON"),
    (lambda lines: [*lines[:2], "", *lines[2:]], "r:3: is not a record"),
    (lambda lines: [*lines[:2], "{", *lines[2:]], "r:3: is not a record .*not JSON"),
    (lambda lines: [*lines[:2], "[1]"], "r:3: .*expected a JSON object, got a list"),
    (lambda _: ['{"a": 1, "a": 2}'], "key 'a' given twice"),
    (lambda lines: [lines[0], r'{"id": "\ud800"}'], "half a character"),
    (lambda lines: [lines[0], *lines], "r:2: is not a record"),
)  # fmt: skip


def test_files_that_are_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for change, problem in LINES:
        path = write(tmp_path)
        lines = change(path.read_text(encoding="utf-8").splitlines())
        path.write_text("\n".join(lines), encoding="utf-8")
        with pytest.raises(MeasureError, match=problem):
            read_measurement(path)
    path.write_bytes(b"\xff\xfe")
    for place, problem in (
        (path, "r:1: is not a setup"), (tmp_path, "a folder, not a file"),
        (tmp_path / "none", "cannot be read: .*No such file"),
    ):  # fmt: skip
        with pytest.raises(MeasureError, match=problem):
            read_measurement(place)
    path = write(tmp_path)
    for bound, most in (("_MOST_BYTES", 700), ("_LONGEST_LINE", 300)):
        monkeypatch.setattr(measurement_file, bound, most)
        with pytest.raises(MeasureError, match=rf"r:\d: more than {most} bytes, which no measure"):
            read_measurement(path)


def test_the_identity_of_prompts_is_theirs_and_their_order() -> None:
    one, other = ("a", "b", "c"), ("d", "e", "f")
    found = {prompts_sha256(each) for each in ([one, other], [other, one], [one], [])}
    assert len(found) == 4
