"""The gate's report as JSON: every kind is read as it was written, and nothing else is."""

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from draftquant.validate.errors import GateError
from draftquant.validate.parity.finding_file import to_mapping
from draftquant.validate.report import document as document_module
from draftquant.validate.report.document import (
    SCHEMA_VERSION,
    Comparison,
    Header,
    Joint,
    Judged,
    Retuned,
    document_text,
    parse_report,
    read_report,
)
from handmade_reports import (
    DRAFTS,
    ENGINES,
    comparison,
    document,
    joint,
    mapping_of,
    retuned,
    served,
    text_of,
)

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("verdict", ["PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS"])
def test_a_comparison_is_read_as_it_was_written(verdict: str) -> None:
    judged = comparison(verdict)
    read = document(judged)
    assert isinstance(read.judgement, Comparison)
    assert read.judgement.verdict == verdict
    assert read.header.drafts == DRAFTS
    assert read.header.engines == ENGINES
    ((title, found),) = read.comparisons
    assert (title, found) == ("", read.judgement)
    assert found.change == judged.change  # type: ignore[attr-defined]
    assert found.baseline == judged.baseline  # type: ignore[attr-defined]
    assert found.prompts == judged.prompts  # type: ignore[attr-defined]
    assert len(found.prompts) == 40
    written = {"kind": "comparison"} | dataclasses.asdict(found)
    rest = {k: v for k, v in mapping_of(judged).items() if k not in dataclasses.asdict(read.header)}
    assert json.loads(json.dumps(written)) == json.loads(json.dumps(rest))


def test_a_retuned_draft_has_two_comparisons() -> None:
    read = document(retuned())
    assert isinstance(read.judgement, Retuned)
    assert [title for title, _ in read.comparisons] == [
        "Against BF16 taught alike: quantization",
        "Against BF16 as released: quantization and training",
    ]
    assert read.judgement.verdict == "PASS"
    assert read.findings == ()
    assert read.noise is None


def test_a_joint_report_has_all_that_was_judged() -> None:
    read = document(joint())
    assert isinstance(read.judgement, Joint)
    assert [title for title, _ in read.comparisons] == ["Replayed", "Served"]
    assert read.noise is not None
    assert [one.what for one in read.findings] == ["gsm8k exact_match"]
    (_, of_server) = read.comparisons[1]
    assert of_server.served is not None
    assert of_server.served.concurrency == (1, 1)


def test_measurements_alone_are_a_comparison() -> None:
    read = document(served())
    assert isinstance(read.judgement, Comparison)
    assert read.judgement.traces is None


def test_equal_judgements_are_equal_files(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text_of(comparison()), encoding="utf-8")
    assert text_of(comparison()) == (tmp_path / "report.json").read_text(encoding="utf-8")
    assert read_report(tmp_path / "report.json") == document(comparison())


# ---- what is no report


def said(text: str) -> str:
    with pytest.raises(GateError) as caught:
        parse_report(text, "r.json")
    return str(caught.value)


def test_a_report_of_before_versions() -> None:
    judged: Any = comparison()
    text = said(document_text(judged.to_mapping()))
    assert "was written by a draftquant before 0.2: expected schema_version 1, got none" in text
    assert "fix: run the gate again with --report" in text


def test_a_report_of_a_later_version() -> None:
    later = mapping_of(comparison()) | {"schema_version": SCHEMA_VERSION + 1}
    text = said(document_text(later))
    assert "was written by a newer draftquant: expected schema_version 1, got 2" in text
    assert "fix: install a newer draftquant" in text


def test_a_report_of_parity_belongs_elsewhere() -> None:
    findings = document(joint()).findings
    text = said(json.dumps(to_mapping(findings)))
    assert "is a report of parity, not of the gate" in text
    assert "fix: gate ... --parity r.json" in text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1]", "expected a JSON object"),
        ("{", "not JSON"),
        ('{"a": 1}', "expected format 'draftquant gate', got None"),
        ('{"format": ["x"]}', r"expected format 'draftquant gate', got \['x'\]"),
        ('{"format": "draftquant gate", "schema_version": true}', "draftquant: missing key"),
        ('{"format": "draftquant gate", "format": 1}', "key 'format' given twice"),
    ],
)
def test_foreign_json(text: str, what: str) -> None:
    with pytest.raises(GateError, match=what):
        parse_report(text, "r.json")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="cannot be read"):
        read_report(tmp_path / "none.json")
    with pytest.raises(GateError, match="a folder, not a file"):
        read_report(tmp_path)


def change(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(mapping: dict[str, Any]) -> None:
        at: Any = mapping
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return edit


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda mapping: mapping.pop(name)


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "exit code": (change("exit_code", to=1), "exit_code: PASS has 0, got 1"),
    "K": (change("num_draft_tokens", to=0), "num_draft_tokens: expected 1 to 1000, got 0"),
    "length": (change("baseline", "mean_acceptance_length", to=9.0), "expected 1 to 2"),
    "histogram": (change("candidate", "histogram", to=[1]), "expected 2 counts of rounds"),
    "negative": (change("candidate", "histogram", to=[-1, 2]), "expected 2 counts of rounds"),
    "no round": (change("candidate", "histogram", to=[0, 0]), "expected 2 counts of rounds"),
    "survival": (change("baseline", "survival", to=[1.5]), r"survival: expected 1 shares in \[0"),
    "conditional": (change("baseline", "conditional", to=[]), "conditional: expected 1 shares"),
    "bounds": (change("change", "lower", to=1.0), "expected lower <= log_ratio <= upper"),
    "huge": (change("change", "upper", to=1e300), "expected lower <= log_ratio <= upper"),
    "confidence": (change("change", "confidence", to=1.0), r"expected a share in \(0.5, 1\)"),
    "limit": (change("policy", "max_relative_drop", to=1.0), "max_relative_drop: expected a share"),
    "category": (change("categories", 0, "change", "lower", to=3.0), "expected lower <="),
    "prompt": (change("prompts", 3, "baseline", to=[1, 2, 3]), "prompts: 'p3': expected 2 counts"),
    "unknown key": (change("color", to=1), "color: unknown key"),
    "missing key": (drop("policy"), "policy: missing key"),
    "kind": (change("kind", to="x"), "kind: expected 'comparison' or 'retuned' or 'joint'"),
    "no kind": (drop("kind"), "kind: missing key"),
    "type": (change("drafts", "candidate", "sha256", to=1), "drafts.candidate.sha256: expected"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_no_gate_says(name: str) -> None:
    edit, what = CONTRADICTIONS[name]
    mapping = json.loads(text_of(comparison()))
    edit(mapping)
    with pytest.raises(GateError, match=what) as caught:
        parse_report(document_text(mapping), "r.json")
    assert "is no report of the gate" in str(caught.value)


@pytest.mark.parametrize(
    ("judged", "edit", "what"),
    [
        (retuned, change("exit_code", to=3), "exit_code: PASS has 0, got 3"),
        (joint, change("exit_code", to=3), "exit_code: PASS has 0, got 3"),
        (joint, change("noise", "change", "upper", to=99.0), "expected lower <="),
        (joint, change("parity", 0, "threshold", to=None), "PASS without a threshold"),
    ],
)
def test_what_no_gate_says_of_several(
    judged: Callable[[], Judged], edit: Callable[[dict[str, Any]], None], what: str
) -> None:
    mapping = json.loads(text_of(judged()))
    edit(mapping)
    with pytest.raises(GateError, match=what):
        parse_report(document_text(mapping), "r.json")


def test_a_joint_report_of_nothing() -> None:
    mapping = json.loads(text_of(joint())) | {"served": None, "replayed": None}
    with pytest.raises(GateError, match="served, replayed: expected one of them"):
        parse_report(document_text(mapping), "r.json")


# ---- its documentation


def keys_of(cls: type) -> Iterator[str]:
    """Of a dataclass, and of all dataclasses in it."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield field.name
        for kind in classes_in(hints[field.name]):
            yield from keys_of(kind)


def classes_in(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint):
        yield typing.cast(type, hint)
    for inner in typing.get_args(hint):
        yield from classes_in(inner)


OF_TRACES = {"config_sha256", "weights_sha256", "num_layers", "vocab_size", "top_p", "top_k",
             "seed", "repeats", "constant", "share"}  # fmt: skip
"""Keys of trace.json and of what the traces say of themselves."""


def test_every_key_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "report-format.md").read_text(encoding="utf-8")
    written = {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", span)}
    kinds = (Header, Comparison, Retuned, Joint)
    keys = {key for kind in kinds for key in keys_of(kind)} - OF_TRACES
    assert keys - written == set()
    cells = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    named = {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}
    assert named - keys == set()
    assert f"`schema_version` is {document_module.SCHEMA_VERSION}." in text
    assert f'`"{document_module.FORMAT}"`' in text
