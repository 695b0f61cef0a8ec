"""The gate's report as JSON is read as it was written, and nothing else is; its command line."""

import dataclasses
import functools
import html
import json
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from draftquant.recipes.errors import GateError
from draftquant.scripts.cli import main
from draftquant.validate.comparison.sources import ReplayedDraft, ReplayedPrompt
from draftquant.validate.judging.judgement import GateReport
from draftquant.validate.parity.finding import to_mapping
from draftquant.validate.report import document as document_module
from draftquant.validate.report.document import (
    Judgement,
    ReportHeader,
    document_text,
    parse_report,
    read_report,
)
from draftquant.validate.runs.report_pages import annotation, asked_for
from draftquant.validate.served.joint_report import JointReport
from handmade_measurements import losing, written
from handmade_reports import DRAFTS, ENGINES, EVIL, comparison, document, joint, mapping_of, text_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("verdict", ["PASS", "ANOMALOUS"])
def test_a_comparison_is_read_as_it_was_written(verdict: str, tmp_path: Path) -> None:
    judged: Any = comparison(verdict)
    (tmp_path / "report.json").write_text(text_of(judged), encoding="utf-8")
    read = read_report(tmp_path / "report.json")
    assert (read.judgement.verdict, read.judgement.change) == (verdict, judged.change)  # type: ignore[union-attr]
    assert (read.header.drafts, read.header.engines) == (DRAFTS, ENGINES)
    ((title, found),) = read.comparisons
    assert (title, found, len(found.prompts)) == ("", read.judgement, 40)
    written = {"kind": "comparison"} | dataclasses.asdict(found)
    rest = {k: v for k, v in mapping_of(judged).items() if k not in dataclasses.asdict(read.header)}
    assert json.loads(json.dumps(written)) == json.loads(json.dumps(rest))


# ---- what is no report, contradicts itself, or does not follow from its counts

Edit = Callable[[dict[str, Any]], object]


def said(text: str) -> str:
    with pytest.raises(GateError) as caught:
        parse_report(text, "r.json")
    return str(caught.value)


FORMAT = '{"format": "draftquant gate", '
FOREIGN = (
    "[1]", "{", '{"a": 1}', f'{FORMAT}"schema_version": true}}', f'{FORMAT}"schema_version": 1}}',
    f'{FORMAT}"schema_version": 3}}', f'{FORMAT}"format": 1}}',
    json.dumps(to_mapping(document(joint()).findings)),
)  # fmt: skip


def test_what_is_no_report(tmp_path: Path) -> None:
    for text in FOREIGN:
        assert said(text)
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none.json", tmp_path / "folder"):
        with pytest.raises(GateError):
            read_report(path)


def change(*path: str | int, to: Any) -> Edit:
    def edit(mapping: dict[str, Any]) -> None:
        at: Any = mapping
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return edit


def candidate_is_the_baseline(mapping: dict[str, Any]) -> None:
    for prompt in mapping["prompts"]:
        prompt["candidate"] = prompt["baseline"]
    mapping["candidate"]["histogram"] = mapping["baseline"]["histogram"]


def edited(text: str, *edits: Edit) -> str:
    mapping = json.loads(text)
    for edit in edits:
        edit(mapping)
    return document_text(mapping)


@functools.cache
def two_categories() -> Judgement:
    return comparison("INCONCLUSIVE", categories="aabb")


ANOTHER, HASH = change("policy", "name", to="custom"), "9" * 64
EDITED: dict[str, list[Edit]] = {
    "K": [change("num_draft_tokens", to=0)],
    "K + 1 columns": [change("candidate", "histogram", to=[1])],
    "negative": [change("candidate", "histogram", to=[-1, 2])],
    "no step": [change("candidate", "histogram", to=[0, 0])],
    "no steps": [change("prompts", 3, "baseline", to=[0.5, 0])],
    "prompt": [change("prompts", 3, "baseline", to=[1, 2, 3])],
    "limit": [change("policy", "max_relative_drop", to=1.0)],
    "release": [change("policy", "max_relative_drop", to=0.5)],
    "looks": [change("look", to={"number": 3, "total": 2, "spending": "pocock"})],
    "unknown key": [change("color", to=1)],
    "missing key": [lambda mapping: mapping.pop("policy")],
    "kind": [change("kind", to="x")],
    "type": [change("drafts", "candidate", "sha256", to=1)],
    "exit code": [change("exit_code", to=0)],
    "survival": [change("baseline", "survival", to=[1.5])],
    "conditional": [change("baseline", "conditional", to=[])],
    "bound": [change("change", "upper", to=1e300)],
    "loops": [lambda mapping: mapping.update(change_without_loops=mapping["change"])],
    "figure": [change("relative_change", to=0.0)],
    "verdict": [change("verdict", to="PASS"), change("exit_code", to=0)],
    "length": [change("candidate", "mean_acceptance_length", to=1.602)],
    "counts": [change("prompts", 0, "candidate", to=[0, 1000])],
    "all counts": [candidate_is_the_baseline],
    "no counts": [change("prompts", to=[])],
    "copies": [change("num_copies", to=1)],
    "prompts": [change("num_prompts", to=400)],
    "short ones": [change("num_short_prompts", to=-1)],
    "policy": [ANOTHER, change("policy", "max_relative_drop", to=0.5)],
    "looser": [ANOTHER, change("policy", "min_prompts", to=29)],
    "category": [change("categories", 0, "outcome", to="PASS")],
    "advice": [change("required_num_prompts", to=None)],
    "look": [change("look", to={"number": 1, "total": 2, "spending": "pocock"})],
    "candidate": [change("background", "candidate_sha256", to=HASH)],
    "baseline": [change("drafts", "baseline", "sha256", to=HASH)],
    "nothing counted": [change("traces", to=None)],
    "too few steps": [change("num_short_prompts", to=999_999)],
}
OF_SEVERAL: tuple[Edit, ...] = (
    change("exit_code", to=3),
    change("noise", "change", "upper", to=-99.0),
    change("noise", "change", "upper", to=99.0),
    change("noise", "drift", "confidence", to=0.95),
    change("noise", "verdict", to="FAIL"),
    change("parity", 0, "threshold", to=None),
    change("parity", 0, "verdict", to="FAIL"),
    change("replayed", "num_prompts", to=3),
    change("served", "num_prompts", to=3),
    change("served", to=None),
    lambda m: m.update(served=None, replayed=None),
)
"""What each is told is kept in told/report.txt."""


def test_an_edited_report_is_refused() -> None:
    of_one, of_several = text_of(two_categories()), text_of(joint())
    for edits in EDITED.values():
        assert said(edited(of_one, *edits))
    for edit in OF_SEVERAL:
        assert said(edited(of_several, edit))


def test_a_date_is_one_or_absent() -> None:
    mapping = json.loads(text_of(two_categories(), date="2026-11-23T07:42:26Z"))
    assert parse_report(document_text(mapping), "r.json").header.date == "2026-11-23T07:42:26Z"
    del mapping["date"]
    assert parse_report(document_text(mapping), "r.json").header.date is None
    for date in ("yesterday", "2026-13-01T00:00:00Z", "2026-11-23T7:42:26Z"):
        assert said(document_text(mapping | {"date": date}))


# ---- its documentation


def keys_of(hint: Any) -> Iterator[str]:
    """Of a dataclass, and of all dataclasses in it."""
    if dataclasses.is_dataclass(hint):
        for name, kind in typing.get_type_hints(hint).items():
            yield name
            yield from keys_of(kind)
    for inner in typing.get_args(hint):
        yield from keys_of(inner)


def words(text: str) -> set[str]:
    return {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", span)}


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "report.md").read_text(encoding="utf-8")
    section = text.partition("## What `replay --json` prints")[2]
    of_replay = {f.name for k in (ReplayedDraft, ReplayedPrompt) for f in dataclasses.fields(k)}
    assert of_replay - words(section) == set()
    kinds = (ReportHeader, GateReport, JointReport)
    assert {key for kind in kinds for key in keys_of(kind)} - words(text) == set()
    assert f"`schema_version` is {document_module.SCHEMA_VERSION}." in text
    assert f'`"{document_module.FORMAT}"`' in text


Capsys = pytest.CaptureFixture[str]

REFUSED = (
    "gate nowhere none --traces t --html x.json",
    "gate nowhere none --traces t --junit none/x.xml",
    "gate nowhere none --traces t --github",
    "compare nowhere.json none.json -k 3",
    "compare nowhere.json none.json --plot x.png",
)


def test_outputs_are_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts and traces do not even exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    for command in REFUSED:
        assert main(command.split()) == 2
        assert list(tmp_path.iterdir()) == []
    for epoch in ("yesterday", "-1", "1.5", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        assert main(["gate", "nowhere", "none", "--traces", "t"]) == 2
    for text in ("chat", "chat=x", "chat=0.5,chat=0.5", "=1"):
        with pytest.raises(SystemExit):
            main(["compare", "a.json", "--traffic", text])


def test_github_gets_a_summary_and_an_annotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    summary = tmp_path / "summary.md"
    runs = [str(written(tmp_path / name, losing(drop))) for drop, name in enumerate("ab")]
    summary.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    gate = ["gate", "--measured", *runs, "--github", "--json", "--max-relative-drop", "0.001"]
    assert main(gate) == 1
    output = capsys.readouterr()
    json.loads(output.out)  # nothing but JSON there
    assert "::error title=draftquant gate%3A FAIL::With 95%25 confidence the drop" in output.err
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n### FAIL: draftquant gate of `b`")


def test_a_report_keeps_what_was_asked_without_what_was_shown() -> None:
    shown = "--json --github --overwrite --debug -q --quiet -v --verbose -k 3"
    assert asked_for(["draftquant", "gate", *shown.split()]) == ("draftquant", "gate", "-k", "3")


def test_an_annotation_is_one_line_and_as_red_as_the_job() -> None:
    text = annotation("FAIL", f"100% of {EVIL}::set-output", inconclusive_fails=True)
    assert text.startswith("::error title=draftquant gate%3A FAIL::100%25 of ")
    assert {"\n", "\x1b"}.isdisjoint(text)
    for verdict, fails, level in (
        ("PASS", True, "notice"), ("INCONCLUSIVE", True, "error"),
        ("INCONCLUSIVE", False, "warning"), ("ANOMALOUS", False, "error"),
    ):  # fmt: skip
        assert annotation(verdict, "why", inconclusive_fails=fails).startswith(f"::{level} title=")


def test_reports_are_compared_for_a_traffic(tmp_path: Path, capsys: Capsys) -> None:
    report, page = tmp_path / "g.json", tmp_path / "c.html"
    report.write_text(text_of(comparison("FAIL", categories="ab")), encoding="utf-8")
    words = ["--traffic", "a=0.7,b=30%", "--html", str(page), "--plot", str(tmp_path / "c.svg")]
    assert main(["compare", str(report), *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["traffic"], told["scopes"][0]["name"]) == ({"a": 0.7, "b": 0.3}, "your traffic")
    assert told["answer"] in html.unescape(page.read_text(encoding="utf-8"))
    ElementTree.fromstring((tmp_path / "c.svg").read_text(encoding="utf-8"))
