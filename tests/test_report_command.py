"""`gate --html ...`, `report` and `compare` on the command line, on the shipped pair."""

import html
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from draftquant.quantize.files.hub import recorded_argv
from draftquant.scripts.cli import main
from draftquant.validate.judging.candidate_origin import DraftFolder
from draftquant.validate.judging.judgement import GateReport
from draftquant.validate.measure.measurement_file import line_of
from draftquant.validate.report.document import read_report
from draftquant.validate.report.facts import folder_facts
from draftquant.validate.report.html_report import page
from draftquant.validate.report.report_texts import markdown
from draftquant.validate.runs.report_pages import annotation
from handmade_measurements import alternating, measurement
from handmade_reports import EVIL, comparison, text_of

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
DRAFT, TARGET = str(PAIR / "draft"), str(PAIR / "target")
LOOSE = ["--min-prompts", "5", "--max-relative-drop", "0.5"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Traces of 18 prompts, and the shipped draft in INT4 and FP8."""
    folder = tmp_path_factory.mktemp("report")
    prompts = folder / "prompts.jsonl"
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    prompts.write_text("".join(lines[:18]), encoding="utf-8")
    record = ["record", "--target", TARGET, "--draft", DRAFT, "--prompts", str(prompts)]
    assert main([*record, "--out", str(folder / "traces"), "--max-new-tokens", "48"]) == 0
    for recipe in ("int4-channel", "fp8-ptpc"):
        out = str(folder / recipe)
        assert main(["quantize", DRAFT, "--recipe", recipe, "--out", out]) == 0
        report = ["--report", str(folder / f"{recipe}.json")]
        traces = ["--traces", str(folder / "traces")]
        assert main(["gate", DRAFT, out, *traces, *LOOSE, *report]) == 0
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two measurements whose comparison passes."""
    for name, drop in (("a", 0), ("b", 1)):
        one = measurement([alternating(200, 80 + i % 5 + drop) for i in range(40)])
        text = line_of(one.setup) + "".join(map(line_of, one.records))
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return ["--measured", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def outputs(folder: Path) -> list[str]:
    formats = (("html", "html"), ("markdown", "md"), ("junit", "xml"), ("report", "json"))
    return [part for kind, end in formats for part in (f"--{kind}", str(folder / f"g.{end}"))]


def test_a_report_knows_drafts_by_their_hashes(work: Path) -> None:
    found = read_report(work / "int4-channel.json")
    drafts = found.header.drafts
    assert drafts.baseline.sha256 == DraftFolder.read(Path(DRAFT)).sha256
    assert drafts.candidate.sha256 == DraftFolder.read(work / "int4-channel").sha256
    assert (drafts.baseline.family, drafts.candidate.family) == ("eagle3-llama", "eagle3-llama")
    assert (drafts.baseline.num_bytes, drafts.candidate.num_bytes) == (3_082_240, 1_858_160)
    assert drafts.baseline.quantization == "none"
    made = drafts.candidate.quantized
    assert made is not None
    assert (made.recipe, made.num_quantized, made.num_kept) == ("int4-channel", 7, 7)
    assert (made.bytes_before, made.bytes_after) == (3_082_240, 1_858_160)
    assert made.formats == ("weights int4 per channel, activations none",)
    assert made.rules[0].tensors == "attention, mlp"
    verdicts = {(one.engine, one.arch): one.verdict for one in found.header.engines}
    assert verdicts["vllm", "sm90"] == "LOADS"
    assert verdicts["sglang", "gfx942"] == "REFUSED"
    launches = [one.launch for one in found.header.engines if one.launch]
    assert launches
    assert all(str(work) not in launch for launch in launches)
    assert found.header.argv[:2] == ("draftquant", "gate")
    assert str(work) not in (work / "int4-channel.json").read_text(encoding="utf-8")


def test_a_draft_of_another_tool_has_no_record(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work / "int4-channel", tmp_path / "foreign")
    (tmp_path / "foreign" / "draftquant.json").unlink()
    found = folder_facts(str(tmp_path / "foreign"), DraftFolder.read(tmp_path / "foreign"))
    assert (found.name, found.quantization) == ("foreign", "of another tool")
    assert found.quantized is None
    assert found.num_bytes == 1_858_160


def test_the_gate_writes_every_form_and_report_the_same(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = ["gate", DRAFT, str(work / "fp8-ptpc"), "--traces", str(work / "traces"), *LOOSE]
    assert main([*gate, *outputs(tmp_path)]) == 0
    assert "PASS" in capsys.readouterr().out
    names = ("g.html", "g.json", "g.md", "g.xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == list(names)
    first = {name: (tmp_path / name).read_bytes() for name in names}
    assert first["g.html"].startswith(b"<!doctype html>")
    assert first["g.md"].startswith(b"### PASS")
    assert ElementTree.fromstring(first["g.xml"]).get("failures") == "0"
    again = ["report", str(tmp_path / "g.json"), *outputs(tmp_path)[:6]]
    assert main(again) == 2
    assert "this report file already exists" in capsys.readouterr().err
    assert main([*again, "--overwrite"]) == 0
    assert capsys.readouterr().err.count(": PASS") == 3
    assert {name: (tmp_path / name).read_bytes() for name in names} == first


def test_a_report_says_what_the_json_on_stdout_says(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", *runs, "--report", str(tmp_path / "g.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))
    found = read_report(tmp_path / "g.json")
    assert isinstance(found.judgement, GateReport)
    assert found.header.engines == ()
    assert found.header.drafts.candidate.name == "b.jsonl"
    assert "no draftquant.json records how" in page(found)


def test_equal_runs_write_equal_reports(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795419746")
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        assert main(["gate", *runs, *outputs(tmp_path / name)]) == 0
    for path in (tmp_path / "x").iterdir():
        assert path.read_bytes() == (tmp_path / "y" / path.name).read_bytes()


def test_a_report_has_the_date_and_the_command_in_every_form(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795419746")
    assert main(["gate", *runs, *outputs(tmp_path)]) == 0
    found = read_report(tmp_path / "g.json")
    assert found.header.date == "2026-11-23T07:42:26Z"
    command = "draftquant gate --measured a.jsonl b.jsonl"
    for name, date in (
        ("g.html", "on 2026-11-23 at 07:42 UTC"),
        ("g.md", "judged 2026-11-23T07:42:26Z by"),
        ("g.xml", 'name="date" value="2026-11-23T07:42:26Z"'),
    ):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert command in text, name
        assert date in text, name


@pytest.mark.parametrize("epoch", ["yesterday", "-1", "1.5", "9" * 30])
def test_a_date_that_is_none_is_refused_before_the_work(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], epoch: str
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    assert main(["gate", *runs]) == 2
    assert "$SOURCE_DATE_EPOCH: expected seconds since 1970, got" in capsys.readouterr().err


def test_how_results_are_shown_is_no_part_of_a_report(
    runs: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795419746")
    assert main(["gate", *runs, "--report", str(tmp_path / "g.json")]) == 0
    capsys.readouterr()
    assert main(["gate", *runs, "--json", "--overwrite"]) == 0
    assert capsys.readouterr().out == (tmp_path / "g.json").read_text(encoding="utf-8")


def test_report_prints_markdown_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "g.json").write_text(text_of(comparison("FAIL")), encoding="utf-8")
    assert main(["report", str(tmp_path / "g.json")]) == 0
    text = capsys.readouterr().out
    assert text == markdown(read_report(tmp_path / "g.json"))
    html = ["--html", str(tmp_path / "g.html")]
    assert main(["report", str(tmp_path / "g.json"), *html, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["written"]) == ("FAIL", [html[1]])


BAD_OUTPUTS = {
    "contradiction": (["--html", "x.json"], "--html: expected a name ending in .html or .htm"),
    "report": (["--report", "x.html"], "--report: expected a name ending in .json"),
    "folder": (["--junit", "none/x.xml"], "the folder of this report file"),
    "github": (["--github"], "expected a step of GitHub Actions, got no $GITHUB_STEP_SUMMARY"),
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_outputs_are_refused_before_any_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafts and traces do not even exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    options, what = BAD_OUTPUTS[name]
    assert main(["gate", "nowhere", "none", "--traces", "t", *options]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert "\n  fix: " in error
    assert list(tmp_path.iterdir()) == []


def test_github_gets_a_summary_and_an_annotation(
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["gate", *runs, "--github", "--json"]) == 0
    output = capsys.readouterr()
    json.loads(output.out)  # nothing but JSON there
    assert (
        "::notice title=draftquant gate%3A PASS::With 95%25 confidence the drop is smaller"
        in output.err
    )
    assert summary.read_text(encoding="utf-8").startswith(
        "before\n### PASS: draftquant gate of `b.jsonl`"
    )
    assert main(["gate", *runs, "--github", "--max-relative-drop", "0.001"]) == 1
    assert "::error title=draftquant gate%3A FAIL::" in capsys.readouterr().err
    assert summary.read_text(encoding="utf-8").count("### ") == 2


def test_an_annotation_is_one_line_whatever_it_quotes() -> None:
    text = annotation("FAIL", f"100% of {EVIL}::set-output")
    assert "\n" not in text
    assert text.startswith("::error title=draftquant gate%3A FAIL::100%25 of ")
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("verdict", "fails", "level"),
    [
        ("PASS", True, "notice"),
        ("INCONCLUSIVE", True, "error"),
        ("INCONCLUSIVE", False, "warning"),
        ("ANOMALOUS", False, "error"),
        ("FAIL", False, "error"),
    ],
)
def test_a_green_job_has_no_red_annotation(verdict: str, fails: bool, level: str) -> None:
    assert annotation(verdict, "why", inconclusive_fails=fails).startswith(f"::{level} title=")


def test_report_files_are_no_part_of_a_recorded_command() -> None:
    argv = ["draftquant", "gate", "/a/b", "--html", "/x/g.html", "--mark", "m.md", "--junit=/j.xml"]
    assert recorded_argv([*argv, "--max-relative-drop", "1%"]) == (
        "draftquant", "gate", "b", "--max-relative-drop", "1%",
    )  # fmt: skip


# ---- compare


def test_drafts_on_traces_are_compared(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = [DRAFT, str(work / "int4-channel"), str(work / "fp8-ptpc")]
    out = ["--html", str(tmp_path / "c.html"), "--plot", str(tmp_path / "c.svg")]
    report = ["--report", str(tmp_path / "c.json")]
    traces = ["--traces", str(work / "traces")]
    assert main(["compare", *drafts, *traces, *out, *report]) == 0
    shown = capsys.readouterr().out
    assert "Comparison, K = 3, against draft" in shown
    assert "all bounds hold together with 95.00% confidence" in shown
    assert "max-t over all pairs and categories" in shown
    told = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert (told["format"], told["schema_version"]) == ("draftquant comparison", 1)
    assert [one["name"] for one in told["drafts"]] == ["draft", "int4-channel", "fp8-ptpc"]
    assert told["answer"] in shown
    assert told["answer"] in html.unescape((tmp_path / "c.html").read_text(encoding="utf-8"))
    ElementTree.fromstring((tmp_path / "c.svg").read_text(encoding="utf-8"))
    reports = [str(work / "int4-channel.json"), str(work / "fp8-ptpc.json")]
    assert main(["compare", *reports, "--json"]) == 0
    of_files = json.loads(capsys.readouterr().out)
    assert of_files["scopes"] == told["scopes"]  # the counts are the same


def test_traffic_is_written_as_people_do(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    categories = [
        one["category"]
        for one in json.loads((work / "fp8-ptpc.json").read_text(encoding="utf-8"))["categories"]
        if one["num_prompts"] > 1
    ]
    first, second = categories[:2]
    reports = [str(work / "int4-channel.json"), str(work / "fp8-ptpc.json")]
    traffic = ["--traffic", f"{first}=0.7,{second}=30%", "--html", str(tmp_path / "c.html")]
    assert main(["compare", *reports, *traffic, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["traffic"] == {first: 0.7, second: 0.3}
    assert told["scopes"][0]["name"] == "your traffic"
    assert f"{first} 70.0%" in (tmp_path / "c.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["chat", "chat=x", "chat=0.5,chat=0.5", "=1"])
def test_what_is_no_traffic(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "a.json", "--traffic", text])
    assert "--traffic: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["-k", "3"], "--num-draft-tokens: is of use for traces only"),
        (["--batch-size", "3"], "--batch-size: is of use for traces only"),
        ([], "nowhere.json: cannot be read"),
        (["--plot", "x.png"], "--plot: expected a name ending in .svg"),
    ],
)
def test_bad_input_of_compare(
    options: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "nowhere.json", "none.json", *options]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert "\n  fix: " in error
