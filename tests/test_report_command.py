"""Reports on the command line: `gate` writes every form, `report` again, `compare` reads them."""

import html
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from draftquant.quantize.files.hub import recorded_argv
from draftquant.scripts.cli import main
from draftquant.validate.measure.measurement_file import line_of
from draftquant.validate.report.document import read_report
from draftquant.validate.runs.report_pages import annotation
from handmade_measurements import alternating, measurement
from handmade_reports import EVIL, comparison, text_of


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two measurements whose comparison passes, at a time that is given."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795419746")
    for name, drop in (("a", 0), ("b", 1)):
        one = measurement([alternating(200, 80 + i % 5 + drop) for i in range(40)])
        text = line_of(one.setup) + "".join(map(line_of, one.records))
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return ["--measured", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def outputs(folder: Path) -> list[str]:
    formats = (("html", "html"), ("markdown", "md"), ("junit", "xml"), ("report", "json"))
    return [part for kind, end in formats for part in (f"--{kind}", str(folder / f"g.{end}"))]


def test_the_gate_writes_every_form_and_report_the_same(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    assert main(["gate", *runs, *outputs(folder)]) == 0
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(first) == ["g.html", "g.json", "g.md", "g.xml"]
    for name, begins, date in (
        ("g.html", b"<!doctype html>", b"on 2026-11-23 at 07:42 UTC"),
        ("g.md", b"### PASS", b"judged 2026-11-23T07:42:26Z by"),
        ("g.xml", b"<?xml", b'name="date" value="2026-11-23T07:42:26Z"'),
    ):
        assert first[name].startswith(begins)
        assert date in first[name]
        assert b"draftquant gate --measured a.jsonl b.jsonl" in first[name]
    capsys.readouterr()
    assert main(["gate", *runs, "--json", "--overwrite"]) == 0
    assert capsys.readouterr().out.encode() == first["g.json"]
    found = read_report(folder / "g.json")
    assert (found.header.engines, found.header.drafts.candidate.name) == ((), "b.jsonl")
    assert b"no draftquant.json records how" in first["g.html"]
    again = ["report", str(folder / "g.json"), *outputs(folder)[:6]]
    assert main(again) == 2
    assert "this report file already exists" in capsys.readouterr().err
    assert main([*again, "--overwrite"]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


REFUSED: tuple[tuple[list[str], str], ...] = (
    (["gate", "nowhere", "none", "--traces", "t", "--html", "x.json"], "name ending in .html or"),
    (["gate", "nowhere", "none", "--traces", "t", "--junit", "none/x.xml"], "the folder of this"),
    (["gate", "nowhere", "none", "--traces", "t", "--github"], "got no $GITHUB_STEP_SUMMARY"),
    (["compare", "nowhere.json", "none.json", "-k", "3"], "is of use for traces only"),
    (["compare", "nowhere.json", "none.json", "--plot", "x.png"], "a name ending in .svg"),
)


def test_outputs_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafts and traces do not even exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    for command, what in REFUSED:
        assert main(command) == 2
        error = capsys.readouterr().err
        assert what in error
        assert "\n  fix: " in error
        assert list(tmp_path.iterdir()) == []
    for epoch in ("yesterday", "-1", "1.5", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        assert main(["gate", "nowhere", "none", "--traces", "t"]) == 2
        assert "$SOURCE_DATE_EPOCH: expected seconds since 1970, got" in capsys.readouterr().err
    for text in ("chat", "chat=x", "chat=0.5,chat=0.5", "=1"):
        with pytest.raises(SystemExit):
            main(["compare", "a.json", "--traffic", text])
        assert "--traffic: expected" in capsys.readouterr().err


def test_github_gets_a_summary_and_an_annotation(
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["gate", *runs, "--github", "--json", "--max-relative-drop", "0.001"]) == 1
    output = capsys.readouterr()
    json.loads(output.out)  # nothing but JSON there
    assert "::error title=draftquant gate%3A FAIL::With 95%25 confidence the drop" in output.err
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n### FAIL: draftquant gate of `b.jsonl`")


def test_an_annotation_is_one_line_and_as_red_as_the_job() -> None:
    text = annotation("FAIL", f"100% of {EVIL}::set-output")
    assert text.startswith("::error title=draftquant gate%3A FAIL::100%25 of ")
    assert {"\n", "\x1b"}.isdisjoint(text)
    for verdict, fails, level in (
        ("PASS", True, "notice"), ("INCONCLUSIVE", True, "error"),
        ("INCONCLUSIVE", False, "warning"), ("ANOMALOUS", False, "error"),
    ):  # fmt: skip
        found = annotation(verdict, "why", inconclusive_fails=fails)
        assert found.startswith(f"::{level} title=")


def test_report_files_are_no_part_of_a_recorded_command() -> None:
    argv = ["draftquant", "gate", "/a/b", "--html", "/x/g.html", "--mark", "m.md", "--junit=/j.xml"]
    assert recorded_argv([*argv, "--max-relative-drop", "1%"]) == (
        "draftquant", "gate", "b", "--max-relative-drop", "1%",
    )  # fmt: skip


def test_reports_are_compared_for_a_traffic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, page = tmp_path / "g.json", tmp_path / "c.html"
    report.write_text(text_of(comparison("FAIL", categories="ab")), encoding="utf-8")
    words = ["--traffic", "a=0.7,b=30%", "--html", str(page), "--plot", str(tmp_path / "c.svg")]
    assert main(["compare", str(report), *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["traffic"], told["scopes"][0]["name"]) == ({"a": 0.7, "b": 0.3}, "your traffic")
    assert told["answer"] in html.unescape(page.read_text(encoding="utf-8"))
    ElementTree.fromstring((tmp_path / "c.svg").read_text(encoding="utf-8"))
