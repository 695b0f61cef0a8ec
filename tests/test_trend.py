"""`--trend`: the history of releases, one line a report; drawn, tabled, and never damaged."""

import dataclasses
import fcntl
import json
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.files.command_line import recorded_argv
from draftquant.scripts.cli import main
from draftquant.validate.charts.forest import Interval
from draftquant.validate.charts.history import MARKS
from draftquant.validate.charts.history import history as drawn
from draftquant.validate.errors import GateError
from draftquant.validate.report import trend as module
from draftquant.validate.report.html_report import MOST_LISTED, page
from draftquant.validate.report.markdown_report import markdown
from draftquant.validate.report.trend import (
    Appended,
    History,
    TrendEntry,
    append_report,
    entry_of,
    read_trend,
)
from handmade_reports import EVIL, comparison, document, joint, retuned, served, text_of

DATE = "2026-11-23T07:42:26Z"


def entry(verdict: str = "PASS", **changes: Any) -> TrendEntry:
    return dataclasses.replace(entry_of(document(comparison(verdict), date=DATE)), **changes)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_report_in_one_line() -> None:
    judged: Any = comparison("FAIL")
    one = entry_of(document(judged, date=DATE))
    assert (one.date, one.verdict, one.policy, one.limit) == (DATE, "FAIL", "release", 0.01)
    assert (one.draft, one.draft_sha256, one.family) == ("int4", "2" * 64, "eagle3-llama")
    assert (one.recipe, one.recipe_sha256) == ("int4-channel", "5" * 64)
    assert (one.baseline, one.baseline_sha256) == ("bf16", "1" * 64)
    assert one.target == judged.traces.target.name
    assert (one.change, one.lower, one.upper) == (
        judged.relative_change, *judged.change.relative_bounds,
    )  # fmt: skip
    assert (one.num_prompts, one.confidence) == (40, 0.95)
    assert one.effective_num_prompts == judged.change.effective_num_prompts


@pytest.mark.parametrize("judged", [retuned, joint, served])
def test_every_kind_of_report_has_a_line(judged: Any) -> None:
    found = document(judged())
    one = entry_of(found)
    assert one.verdict == found.judgement.verdict
    assert one.change is not None


def test_lines_are_added_and_read(tmp_path: Path) -> None:
    path = tmp_path / "trend.jsonl"
    path.write_text("", encoding="utf-8")  # an empty file is a history without reports
    entries = [entry(), entry("FAIL", date="2026-11-24T00:00:00Z"), entry("ANOMALOUS")]
    for number, one in enumerate(entries, 1):
        assert append_report(path, one) == Appended(number, is_new=True)
    assert read_trend(path) == tuple(entries)
    assert path.read_text(encoding="utf-8").count("\n") == 3


def test_a_report_that_is_there_already_is_not_added_again(tmp_path: Path) -> None:
    path = tmp_path / "trend.jsonl"
    append_report(path, entry())
    append_report(path, entry("FAIL"))
    before = path.read_bytes()
    again = entry(date="2027-01-01T00:00:00Z")
    assert append_report(path, again) == Appended(1, is_new=False)
    assert path.read_bytes() == before
    assert append_report(path, entry(traces_sha256="f" * 64)).is_new


HOSTILE = {
    "no JSON": "nonsense",
    "an empty line": "",
    "a list": "[]",
    "a key too many": json.dumps(dataclasses.asdict(entry()) | {"more": 1}),
    "a key too few": json.dumps({"format": "draftquant trend", "schema_version": 1}),
    "another format": json.dumps(dataclasses.asdict(entry()) | {"format": "draftquant gate"}),
    "another version": json.dumps(dataclasses.asdict(entry()) | {"schema_version": 2}),
    "NaN": json.dumps(dataclasses.asdict(entry()) | {"change": float("nan")}),
    "a verdict": json.dumps(dataclasses.asdict(entry()) | {"verdict": "GOOD"}),
    "bounds in disorder": json.dumps(dataclasses.asdict(entry()) | {"lower": 0.5}),
    "half of the bounds": json.dumps(dataclasses.asdict(entry()) | {"lower": None}),
    "a limit": json.dumps(dataclasses.asdict(entry()) | {"limit": 0.0}),
    "a date": json.dumps(dataclasses.asdict(entry()) | {"date": "today"}),
    "a doubled key": json.dumps(dataclasses.asdict(entry()))[:-1] + ', "limit": 0.5}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_line_that_is_none_is_an_error_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trend.jsonl"
    append_report(path, entry())
    path.write_text(f"{path.read_text(encoding='utf-8')}{line}\n", encoding="utf-8")
    before = path.read_bytes()
    for act in (lambda: read_trend(path), lambda: append_report(path, entry("FAIL"))):
        with pytest.raises(GateError, match=r"trend\.jsonl:2: is no line that 'gate --trend'"):
            act()
    assert path.read_bytes() == before


def test_a_line_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trend.jsonl"
    append_report(path, entry())
    path.write_bytes(path.read_bytes() + b'{"format": "draft')
    with pytest.raises(GateError, match=r"trend\.jsonl:2: has no line end"):
        append_report(path, entry("FAIL"))


def test_a_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trend.jsonl"
    append_report(path, entry())
    before = path.read_bytes()
    write = module.os.write
    monkeypatch.setattr(module.os, "write", lambda at, data: write(at, data[:10]))
    with pytest.raises(GateError, match="cannot be read and written: the disk is full"):
        append_report(path, entry("FAIL"))
    assert path.read_bytes() == before


def _append(path: Path, number: int) -> None:
    for one in range(5):
        append_report(path, entry(draft=f"draft {number}-{one}"))


def test_runs_beside_each_other_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "trend.jsonl"
    fork = multiprocessing.get_context("fork")
    runs = [fork.Process(target=_append, args=(path, number)) for number in range(6)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0] * 6
    assert sorted(one.draft for one in read_trend(path)) == sorted(
        f"draft {number}-{one}" for number in range(6) for one in range(5)
    )


def test_a_run_waits_for_another_that_adds_a_line(tmp_path: Path) -> None:
    """Else both would read the same lines, and one report could be added twice."""
    path = tmp_path / "trend.jsonl"
    append_report(path, entry())
    with path.open("a", encoding="utf-8") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        run = threading.Thread(target=_append, args=(path, 0))
        run.start()
        run.join(0.5)
        assert run.is_alive()
        assert len(read_trend(path)) == 1
    run.join()
    assert len(read_trend(path)) == 6


# ---- what is drawn


def test_a_history_is_of_one_family_and_target() -> None:
    own = entry()
    others = [entry(family="dflash"), entry(target="another target")]
    earlier = entry("FAIL", date="2026-11-01T00:00:00Z")
    found = History.of([*others, earlier], own)
    assert (found.entries, found.num_others) == ((earlier, own), 2)
    assert History.of([own, earlier], own).entries == (own, earlier)  # where it stands in the file


def test_page_and_markdown_have_the_history() -> None:
    read = document(comparison("INCONCLUSIVE"), date=DATE)
    earlier = [
        entry(verdict, draft=f"release-{i}", date=f"2026-10-{i + 10}T00:00:00Z")
        for i, verdict in enumerate(("PASS", "FAIL", "ANOMALOUS") * 4)
    ]
    history = History.of([*earlier, entry(family="dflash")], entry_of(read))
    text = page(read, history=history)
    assert "History of releases" in text
    assert 'id="history-title"' in text
    assert f"{MOST_LISTED} of 13 reports of eagle3-llama with the target" in text
    assert "the file has 1 of other families or targets" in text
    assert text.count("(this report)") == 1
    assert "History of releases" not in page(read)
    lines = markdown(read, history=history).splitlines()
    at = lines.index("The last 5 of 13 reports, the newest first:")
    rows = lines[at + 2 : at + 9]
    assert rows[0] == "| date | draft | recipe | change | bounds | limit | verdict |"
    assert rows[2].startswith(f"| {DATE} | `int4` | `int4-channel` | -0.")
    assert rows[3].startswith("| 2026-10-21T00:00:00Z | `release-11` |")
    assert "The last" not in markdown(read)


def test_hostile_names_of_a_history_are_text() -> None:
    read = document(comparison())
    history = History.of([entry(draft=EVIL, recipe=EVIL)], entry_of(read))
    assert "<script" not in page(read, history=history)
    assert "<script" not in markdown(read, history=history)


def test_verdicts_differ_in_colour_and_shape() -> None:
    assert len({shape for shape, _ in MARKS.values()}) == len(MARKS)
    rows = [
        Interval(label=f"2026-11-{i + 10}", estimate=x, lower=x - 0.01, upper=x + 0.01, limit=-0.01)
        for i, x in enumerate((0.0, -0.05, -0.01))
    ]
    nothing = Interval(label="2026-11-20", estimate=None, limit=-0.01)
    text = drawn("h", [*rows, nothing], [*[*MARKS][:3], "ANOMALOUS"], bounds="95% bounds")
    for verdict, (shape, filling) in MARKS.items():
        tag = "circle" if shape == "circle" else "polygon"
        assert f'class="{filling} {verdict}"' in text
        assert f"<{tag} " in text
    assert "2026-11-11: FAIL, -5.00% (-6.00% to -4.00%)" in text
    assert "2026-11-20: ANOMALOUS, no change was measured" in text


def test_many_releases_keep_their_labels_apart() -> None:
    rows = [Interval(label=f"2026-{i:02}-01", estimate=0.0, limit=-0.01) for i in range(30)]
    text = drawn("h", rows, ["PASS"] * 30, bounds="bounds")
    labels = [part.split("<")[0] for part in text.split(">") if part.startswith("2026-")]
    assert labels[-1] == "2026-29-01"
    assert len(labels) <= 6


# ---- on the command line


@pytest.fixture
def report(tmp_path: Path) -> str:
    path = tmp_path / "g.json"
    path.write_text(text_of(comparison("FAIL"), date=DATE), encoding="utf-8")
    return str(path)


def test_report_draws_a_history_and_adds_nothing(
    tmp_path: Path, report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trend.jsonl"
    append_report(path, entry(date="2026-11-01T00:00:00Z"))
    before = path.read_bytes()
    assert main(["report", report, "--trend", str(path)]) == 0
    assert "The last 2 of 2 reports, the newest first:" in capsys.readouterr().out
    html = tmp_path / "g.html"
    assert main(["report", report, "--trend", str(path), "--html", str(html)]) == 0
    assert "History of releases" in html.read_text(encoding="utf-8")
    assert path.read_bytes() == before
    assert main(["report", report, "--trend", str(tmp_path / "none.jsonl")]) == 2
    assert "no such history" in capsys.readouterr().err


def test_a_history_is_no_part_of_a_recorded_command() -> None:
    argv = ["draftquant", "gate", "a", "--trend", "/x/t.jsonl", "--traces", "/y/t"]
    assert recorded_argv(argv) == ("draftquant", "gate", "a", "--traces", "t")


def test_a_bad_history_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafts do not even exist."""
    path = tmp_path / "trend.jsonl"
    path.write_text("nonsense\n", encoding="utf-8")
    gate = ["gate", "none", "none", "--traces", "none", "--trend"]
    for asked, said in (
        (str(path), "trend.jsonl:1: is no line that"),
        (str(tmp_path / "none" / "t.jsonl"), "does not exist"),
        (str(tmp_path), "expected a file, got a folder, a link or a device"),
    ):
        assert main([*gate, asked]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    for ending in ("html", "SVG", "md", "xml"):
        assert main([*gate, str(tmp_path / f"t.{ending}")]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "--trend keeps JSON lines in a file such as trend.jsonl" in said
    same = str(tmp_path / "same.json")
    assert main([*gate, same, "--report", same]) == 2
    assert "both --trend and a report name it" in capsys.readouterr().err
