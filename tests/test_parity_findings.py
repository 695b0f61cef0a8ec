"""Findings and their file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.recipes.errors import ParityError
from draftquant.scripts.verbs.parity import _show
from draftquant.validate.parity.finding import (
    Finding,
    Findings,
    read_parity,
    to_mapping,
    write_findings,
)
from draftquant.validate.parity.lm_eval_tasks import read_samples
from test_hostile_files import bounded, endless, fifo, gigabyte

FOUND = Finding(
    check="task",
    what="gsm8k exact_match",
    estimate=-0.002,
    lower=-0.006,
    upper=0.001,
    confidence=0.95,
    threshold=0.01,
    verdict="PASS",
    reason="because",
    details=({"items": 1319, "discordant": [3, 5], "nested": {"p": 0.72}},),
)
COUNT = Finding(
    check="divergence",
    what="q",
    estimate=3,
    threshold=None,
    verdict="INCONCLUSIVE",
    reason="no threshold",
)


def test_findings_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_findings(tmp_path / "f.json", [FOUND, COUNT])
    assert read_parity(tmp_path / "f.json").findings == (FOUND, COUNT)


def test_bounds_are_printed_under_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    _show(Findings(findings=(FOUND,)), None)
    printed = capsys.readouterr().out
    names = [printed.index(name) for name in ("lower bound", "upper bound", "threshold")]
    (row,) = [line for line in printed.splitlines() if "gsm8k" in line and "0.01" in line]
    figures = [row.index(figure) for figure in ("-0.006", " 0.001", " 0.01 ")]
    assert names == sorted(names)
    assert figures == sorted(figures)


@pytest.mark.parametrize(("change", "what"), [
    ({"threshold": None}, r"findings\[0\]: verdict PASS without a threshold"),
    ({"lower": None}, "bounds and their confidence stand together"),
    ({"upper": None}, "one bound without the other"),
    ({"confidence": 95.0}, r"expected a share in \(0.5, 1\), got 95.0"),
    ({"verdict": "GOOD"}, "verdict: expected 'PASS' or"),
])  # fmt: skip
def test_what_no_check_says_is_refused(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    document = json.loads(json.dumps(to_mapping([FOUND])))
    document["findings"][0] |= change
    (tmp_path / "f.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ParityError, match=what) as caught:
        read_parity(tmp_path / "f.json")
    assert "fix: give what 'draftquant parity' --report wrote" in str(caught.value)


@pytest.mark.parametrize(("text", "what"), [
    ("{", "not JSON"),
    ('{"format": "draftquant parity", "format_version": 1, "findings": []}', "at least one"),
    ('{"format": "draftquant parity", "format_version": 2, "findings": []}', "format_version"),
])  # fmt: skip
def test_what_is_no_report_is_refused(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(text, encoding="utf-8")
    with pytest.raises(ParityError, match=what):
        read_parity(tmp_path / "f.json")
    with pytest.raises(ParityError, match="No such file"):
        read_parity(tmp_path / "none.json")


READERS: dict[str, Callable[[Path], object]] = {
    "findings.json": read_parity,
    "samples_gsm8k_2026-11-22T12-01-02.345678.jsonl": read_samples,
}


@pytest.mark.parametrize("make", [fifo, endless, gigabyte])
@pytest.mark.parametrize("file", READERS)
def test_no_file_blocks_or_fills_the_memory(
    file: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / file)
    with bounded(seconds=20, megabytes=100), pytest.raises(ParityError) as caught:
        READERS[file](tmp_path / file)
    assert str(tmp_path / file) in caught.value.where
