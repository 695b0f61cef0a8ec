"""Report files: names that fit, all or none, and nothing replaced unless that is asked for."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from draftquant import api as dq
from draftquant.quantize.files.report_files import append_text, check_reports, write_reports
from draftquant.recipes.errors import OutputError
from handmade_measurements import losing, written
from handmade_reports import comparison, text_of


def test_an_existing_report_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(OutputError, match="this report file already exists"):
        check_reports({"markdown": path})
    check_reports({"markdown": path}, overwrite=True)
    write_reports({path: "new"}, overwrite=True)
    assert path.read_text(encoding="utf-8") == "new"
    with pytest.raises(OutputError, match="already exists"):
        write_reports({path: "newer"})
    assert path.read_text(encoding="utf-8") == "new"
    with pytest.raises(OutputError, match="cannot be written"):
        write_reports({tmp_path / "removed meanwhile" / "a.md": "new"})
    assert [each.name for each in tmp_path.iterdir()] == ["a.md"]


def test_a_report_that_appears_while_a_verb_works_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it were not there when the settings were checked."""
    path, golden, report = (tmp_path / f"{name}.json" for name in ("new", "golden", "report"))
    runs = [written(tmp_path / name, losing(i, name=name)) for i, name in enumerate("ab")]
    dq.measure(show=runs[0], golden=golden)
    report.write_text(text_of(comparison()), encoding="utf-8")
    verbs: dict[str, Callable[..., object]] = {
        "measure": partial(dq.measure, show=runs[0], golden=path),
        "golden": partial(dq.golden, golden, to="vllm", out=path),
        "report": partial(dq.report, report, markdown=path),
        "compare": partial(dq.compare, runs, report=path),
        "gate": partial(dq.gate, measured=runs, report=path),
    }
    for name, verb in verbs.items():
        monkeypatch.setattr(getattr(dq, name).form.record, "check", lambda _: None)
        path.write_text("new", encoding="utf-8")
        with pytest.raises(OutputError, match="already exists"):
            verb()
        assert path.read_text(encoding="utf-8") == "new", name
        verb(overwrite=True)
        assert path.read_text(encoding="utf-8") != "new", name


def test_what_is_no_report_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "link.md").symlink_to("file")
    (tmp_path / "dangling.md").symlink_to("none")
    for name in ("folder.md", "link.md", "dangling.md"):
        with pytest.raises(OutputError, match="expected a file, got a folder, a link or a device"):
            check_reports({"markdown": tmp_path / name}, overwrite=True)
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="both --report and --golden name this file"):
        check_reports({"report": tmp_path / "a.json", "golden": tmp_path / "again" / "a.json"})


@pytest.mark.parametrize("overwrite", [False, True])
def test_all_or_none(overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third rename fails: what the first two did is undone."""
    paths = [tmp_path / name for name in ("a.html", "b.md", "c.xml")]
    if overwrite:
        paths[0].write_text("old", encoding="utf-8")
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if Path(target).name == "c.xml":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        write_reports(dict.fromkeys(paths, "new"), overwrite=overwrite)
    left = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert left == ({"a.html": "old"} if overwrite else {})


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:3]))
    for text in ("verdict: PASS\n", "two ü\n"):
        append_text(tmp_path / "summary", text)
    monkeypatch.undo()
    assert (tmp_path / "summary").read_text(encoding="utf-8") == "verdict: PASS\ntwo ü\n"
    assert not os.access(tmp_path / "summary", os.X_OK)
    with pytest.raises(OutputError, match="cannot be appended to"):
        append_text(tmp_path, "x")
