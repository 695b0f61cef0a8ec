"""Report files: names that fit, all or none, and nothing replaced unless that is asked for."""

import errno
import os
from pathlib import Path

import pytest
from draftquant.quantize.files.report_files import append_text, check_reports, write_reports
from draftquant.recipes.errors import OutputError


def test_an_existing_report_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(OutputError, match="this report file already exists") as caught:
        check_reports({"markdown": path})
    assert "fix: pass --overwrite to replace it" in str(caught.value)
    check_reports({"markdown": path}, overwrite=True)
    write_reports({path: "new"}, overwrite=True)
    assert path.read_text(encoding="utf-8") == "new"
    with pytest.raises(OutputError, match="already exists"):
        write_reports({path: "newer"})
    assert path.read_text(encoding="utf-8") == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["a.md"]


def test_what_is_no_report_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "link.md").symlink_to("file")
    (tmp_path / "dangling.md").symlink_to("none")
    for name in ("folder.md", "link.md", "dangling.md"):
        with pytest.raises(OutputError, match="expected a file, got a folder, a link or a device"):
            check_reports({"markdown": tmp_path / name}, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_all_reports_or_none(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(OutputError, match="cannot be written: No space left on device") as caught:
        write_reports(dict.fromkeys(paths, "new"), overwrite=overwrite)
    assert "no report was written" in str(caught.value)
    left = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert left == ({"a.html": "old"} if overwrite else {})


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:3]))
    for text in ("verdict: PASS\n", "two ü\n"):
        append_text(tmp_path / "summary", text)
    monkeypatch.undo()
    assert (tmp_path / "summary").read_text(encoding="utf-8") == "verdict: PASS\ntwo ü\n"
    with pytest.raises(OutputError, match="cannot be appended to"):
        append_text(tmp_path, "x")
