"""Staged output: a folder appears whole or not at all, and nothing existing is touched."""

import errno
import os
import stat
from pathlib import Path

import pytest
from draftquant.quantize.files import staging as staging_module
from draftquant.quantize.files.staging import check_output, staged_output, write_text
from draftquant.recipes.errors import OutputError
from draftquant.scripts.cli import main
from tiny import tiny_eagle3_llama


def test_modes_are_those_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        draft = tiny_eagle3_llama(tmp_path / "draft", sharded=True)
        (draft / "deep").mkdir()
        (draft / "deep" / "notes.txt").write_text("", encoding="utf-8")
        outs = [tmp_path / name for name in ("int4", "plain")]
        recipe = ["--recipe", "int4-channel"]
        assert main(["quantize", str(draft), *recipe, "--out", str(outs[0])]) == 0
        assert main(["dequantize", str(outs[0]), "--out", str(outs[1])]) == 0
    finally:
        os.umask(before)
    for out in outs:
        for path in (out, *out.rglob("*")):
            wanted = 0o750 if path.is_dir() else 0o640
            assert (path, stat.S_IMODE(path.stat().st_mode)) == (path, wanted)


def test_a_name_that_may_not_last_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has its name, but the disk does not confirm that it keeps it."""

    def failing(path: Path) -> None:
        if path == tmp_path:
            assert (tmp_path / "out").is_dir()
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(staging_module, "sync", failing)
    with (
        pytest.raises(OutputError, match="cannot be written: Input/output error"),
        staged_output(tmp_path / "out") as staging,
    ):
        write_text(staging / "file.txt", "")
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_process(tmp_path: Path) -> None:
    with staged_output(tmp_path / "out") as staging:
        write_text(staging / "file.txt", "first")
        with (
            pytest.raises(OutputError, match="this process is already writing it"),
            staged_output(tmp_path / "out"),
        ):
            pytest.fail("staged")
    assert (tmp_path / "out" / "file.txt").read_text(encoding="utf-8") == "first"


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


def refused(out: Path, what: str, fix: str, *, source: Path | None = None, size: int = 0) -> None:
    with pytest.raises(OutputError) as caught:
        check_output(out, source, needed_bytes=size)
    assert caught.value.where == str(out)
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_outputs_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, absent = tmp_path / "draft", tmp_path / "absent"
    (source / "deep").mkdir(parents=True)
    (tmp_path / "file").write_text("", encoding="utf-8")
    for link, place in (("link", source), ("broken", absent)):
        (tmp_path / link).symlink_to(place)
    for name in ("draft", "file", "link", "broken"):
        refused(tmp_path / name, "is never overwritten", "give another name")
    refused(absent / "out", f"its parent folder {absent} does not exist", f"mkdir -p {absent}")
    for spelling in ("draft/out", "draft/deep/out", "draft/../draft/out", "link/out"):
        refused(tmp_path / spelling, f"overlaps the source {source}", "beside", source=source)
    refused(source / "out", "overlaps the source", "beside", source=tmp_path / "link")
    refused(tmp_path / "out", "needs 1,000,000,000,000,000,000 bytes", "free some", size=10**18)
    for name in ("out", "draft2", "draft.int4"):  # names that begin like the source's
        check_output(tmp_path / name, source, needed_bytes=1)
    # Root may write everywhere, so the kernel's answer is given here.
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    refused(tmp_path / "out", f"its parent {tmp_path} is not writable", "choose another place")
