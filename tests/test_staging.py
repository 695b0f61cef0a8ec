"""Staged output: a folder appears whole or not at all, and nothing existing is touched."""

import os
import stat
from pathlib import Path

import pytest
from draftquant.quantize.errors import OutputError
from draftquant.quantize.files.staging import check_output, staged_output, write_text


def test_folder_appears_whole_under_its_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged_output(out) as staging:
        assert staging.parent == out.parent
        assert staging.name.startswith(".out.")
        write_text(staging / "nested" / "deep" / "file.txt", "ü\n")
        assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "nested" / "deep" / "file.txt").read_bytes() == b"\xc3\xbc\n"
    assert stat.S_IMODE(out.stat().st_mode) == 0o755


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_exception_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    def half_a_run() -> None:
        with staged_output(tmp_path / "out") as staging:
            write_text(staging / "file.txt", "half")
            raise error

    with pytest.raises(error):
        half_a_run()
    assert list(tmp_path.iterdir()) == []


def test_failed_write_is_an_output_error(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="cannot be written: No such file or directory") as caught,
        staged_output(tmp_path / "out") as staging,
    ):
        (staging / "absent" / "file.txt").write_text("")
    assert caught.value.where == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_output_that_appears_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def overtaken_run() -> None:
        with staged_output(out) as staging:
            write_text(staging / "file.txt", "new")
            write_text(out / "notes.txt", "a month of work")

    with pytest.raises(OutputError, match="already exists"):
        overtaken_run()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_parent_that_takes_no_folder() -> None:
    """procfs refuses new entries to everyone, root included."""
    with (
        pytest.raises(OutputError, match="/proc/self/out: cannot be written: "),
        staged_output(Path("/proc/self/out")),
    ):
        pytest.fail("staged")


def test_parent_that_vanished(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="cannot be written: No such file or directory"),
        staged_output(tmp_path / "absent" / "out"),
    ):
        pytest.fail("staged")


# check_output


def refused(out: Path, what: str, fix: str, *, source: Path | None = None, size: int = 0) -> None:
    with pytest.raises(OutputError) as caught:
        check_output(out, source, needed_bytes=size)
    assert caught.value.where == str(out)
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_output_that_can_be_written(tmp_path: Path) -> None:
    source = tmp_path / "draft"
    source.mkdir()
    for name in ("out", "draft2", "draft.int4"):  # names that begin like the source's
        check_output(tmp_path / name, source, needed_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("kind", ["folder", "file", "link", "broken link"])
def test_existing_output(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_text("")
    else:
        out.symlink_to(tmp_path / ("absent" if kind == "broken link" else ""))
    refused(out, "nothing existing is ever overwritten", "give another output folder")


def test_missing_parent(tmp_path: Path) -> None:
    parent = tmp_path / "absent"
    refused(parent / "out", f"its parent {parent} is no folder", f"mkdir -p {parent}")


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "out", "is no folder", "mkdir -p")


def test_parent_without_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the kernel's answer is given here."""
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    refused(tmp_path / "out", f"its parent {tmp_path} is not writable", "choose another place")


@pytest.mark.parametrize("spelling", ["draft/out", "draft/deep/out", "draft/../draft/out"])
def test_output_inside_the_source(spelling: str, tmp_path: Path) -> None:
    source = tmp_path / "draft"
    (source / "deep").mkdir(parents=True)
    refused(tmp_path / spelling, f"overlaps the source {source}", "beside", source=source)


def test_output_that_holds_the_source(tmp_path: Path) -> None:
    (tmp_path / "out" / "draft").mkdir(parents=True)
    source = tmp_path / "out" / "draft"
    refused(tmp_path / "out", "already exists", "another output folder", source=source)


@pytest.mark.parametrize("linked", ["source", "parent"])
def test_overlap_through_a_link(linked: str, tmp_path: Path) -> None:
    real, link = tmp_path / "draft", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    out, source = (real / "out", link) if linked == "source" else (link / "out", real)
    refused(out, "overlaps the source", "write it beside the source", source=source)


def test_too_little_disk(tmp_path: Path) -> None:
    refused(tmp_path / "out", "needs 1,000,000,000,000,000,000 bytes", "free some", size=10**18)


def test_relative_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with staged_output(Path("out")) as staging:
        write_text(staging / "file.txt", "")
    assert (tmp_path / "out" / "file.txt").exists()
