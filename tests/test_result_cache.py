"""The cache of results: what was written whole by this user is read, and nothing else."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from draftquant.api import clean as clean_from_python
from draftquant.quantize.files.result_cache import ResultCache, resumable_folder, user_cache
from draftquant.quantize.files.staging import CleanReport
from draftquant.recipes.errors import OutputError
from draftquant.scripts.cli import main

KEY, OTHER = {"what": "a", "K": 3}, {"what": "b", "K": 3}
RESULT = bytes(range(256)) * 4 + b"\n\n"


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, warnings: list[str]) -> ResultCache:
    return ResultCache(folder=tmp_path / "made" / "cache", on_warning=warnings.append)


def entry(cache: ResultCache) -> Path:
    (path,) = cache.folder.glob("*.entry")
    return path


def test_what_is_written_is_read(cache: ResultCache, warnings: list[str]) -> None:
    assert cache.read(KEY) is None
    assert not cache.folder.exists()
    cache.write(KEY, RESULT)
    assert cache.read(dict(reversed(KEY.items()))) == RESULT
    assert cache.read(OTHER) is None
    cache.write(KEY, b"")
    assert cache.read(KEY) == b""
    assert warnings == []
    modes = {path.name[-6:]: path.stat().st_mode & 0o777 for path in cache.folder.iterdir()}
    assert modes == {".entry": 0o600, "secret": 0o600}
    assert cache.folder.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run removes each file just before this one does."""
    remove = Path.unlink

    def twice(path: Path, missing_ok: bool = False) -> None:
        remove(path, missing_ok=True)
        remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", twice)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (
            lambda content: content[:-2] + b"?" + content[-1:],
            "edited, cut short, or written by somebody else",
        ),
        (lambda content: content[:-1], "edited, cut short"),
        (lambda content: content + b"\n", "edited, cut short"),
        (lambda content: content.replace(b"cache 1", b"cache 2", 1), "no entry of this version"),
        (lambda _content: b"", "no entry of this version"),
    ],
    ids=["result", "last byte", "longer", "version", "empty"],
)
def test_an_edited_entry_is_refused(
    edit: Callable[[bytes], bytes], why: str, cache: ResultCache, warnings: list[str]
) -> None:
    cache.write(KEY, RESULT)
    entry(cache).write_bytes(edit(entry(cache).read_bytes()))
    assert cache.read(KEY) is None
    (said,) = warnings
    assert said.startswith(f"{entry(cache)}: this entry of the cache is refused: it ")
    assert why in said
    cache.write(KEY, RESULT)
    assert cache.read(KEY) == RESULT


def test_an_entry_under_another_name_is_refused(cache: ResultCache, warnings: list[str]) -> None:
    cache.write(KEY, RESULT)
    first = entry(cache)
    content = first.read_bytes()
    first.unlink()
    cache.write(OTHER, b"other")
    second = entry(cache)
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert cache.read(KEY) is cache.read(OTHER) is None
    assert all("answers another question than its name says" in said for said in warnings)
    assert len(warnings) == 2
    forger = ResultCache(folder=first.parents[1] / "forger", on_warning=warnings.append)
    forger.write(KEY, b"forged")
    first.write_bytes(entry(forger).read_bytes())
    second.unlink()
    os.mkfifo(second)
    assert cache.read(KEY) is cache.read(OTHER) is None
    assert "written by somebody else" in warnings[2]
    assert "a FIFO, not a file" in warnings[3]


def test_a_secret_that_is_none_is_not_used(cache: ResultCache, warnings: list[str]) -> None:
    cache.write(KEY, RESULT)
    (cache.folder / "secret").chmod(0o640)  # readable by others
    assert cache.read(KEY) is None
    cache.write(KEY, RESULT)
    (cache.folder / "secret").chmod(0o600)
    (cache.folder / "secret").write_bytes(b"guess")
    assert cache.read(KEY) is None
    for said, what in zip(warnings, ("is not used", "is not kept", "is not used"), strict=True):
        assert what in said
        assert "32 bytes in a file that only you can read" in said


def test_one_run_has_a_folder(tmp_path: Path) -> None:
    with resumable_folder(tmp_path / "out", "replay", {}):
        both = resumable_folder(tmp_path / "out", "replay", {})
        with pytest.raises(OutputError, match="another process is replay there"), both:
            pass


def test_what_clean_removes_is_counted_and_what_it_cannot_is_said(
    cache: ResultCache, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    none = CleanReport(removed={}, left={})
    assert (cache.clean(), cache.listed()) == (none, none)
    cache.write(KEY, RESULT)
    size, name = entry(cache).stat().st_size, str(cache.folder)
    assert list(cache.listed().left) == [name]
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError(errno.EPERM, "not yours")))
    assert cache.clean() == CleanReport(removed={}, left={name: "cannot be removed: not yours"})
    monkeypatch.undo()
    request.getfixturevalue("faster")
    assert cache.clean() == CleanReport(removed={name: size + 32}, left={})  # with the secret
    assert not cache.folder.exists()


@pytest.mark.usefixtures("faster")
def test_the_least_used_entries_make_room(tmp_path: Path, warnings: list[str]) -> None:
    cache = ResultCache(folder=tmp_path, on_warning=warnings.append, max_bytes=3500)
    (tmp_path / "mine.txt").write_text("not the cache's", encoding="utf-8")
    (tmp_path / ".new-of_a_kil").write_bytes(b"half")
    os.utime(tmp_path / ".new-of_a_kil", (0, 0))
    (tmp_path / ".new-running1").write_bytes(b"half")
    keys = [{"n": n} for n in range(3)]
    for age, key in enumerate(keys):
        cache.write(key, bytes(1000))
        newest = max(tmp_path.glob("*.entry"), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (1000 + age, 1000 + age))
    assert cache.read(keys[0]) is not None  # was used now
    cache.write({"n": 3}, bytes(1000))
    assert [cache.read(key) is not None for key in [*keys, {"n": 3}]] == [True, False, True, True]
    cache.write({"n": 4}, bytes(9000))  # larger than all: it alone stays
    assert [cache.read({"n": n}) is not None for n in range(5)] == [False] * 4 + [True]
    assert not (tmp_path / ".new-of_a_kil").exists()
    assert (tmp_path / ".new-running1").exists()
    assert (tmp_path / "mine.txt").exists()
    assert warnings == []


def test_where_it_is(tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> Path | None:
        cache = user_cache(warnings.append)
        return cache.folder if cache else None

    assert folder() is None  # as the tests are run: set to nothing
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert folder() == tmp_path
    monkeypatch.delenv("DRAFTQUANT_CACHE")
    assert folder() == Path("/xdg/draftquant")
    monkeypatch.setenv("HOME", "/home/of/me")
    for nothing in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert folder() == Path("/home/of/me/.cache/draftquant")
    assert warnings == []
    monkeypatch.setattr(Path, "expanduser", Mock(side_effect=RuntimeError("no home directory")))
    assert folder() is None
    assert "there is no cache" in warnings[0]


def test_clean_lists_it_and_removes_it_when_asked(
    cache: ResultCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    monkeypatch.setenv("DRAFTQUANT_CACHE", str(cache.folder))
    assert main(["clean", str(outputs)]) == 0
    assert capsys.readouterr().out == "0 removed, 0.00 MB; 0 left\n"  # there is none
    cache.write(KEY, RESULT)
    strangers = {"mine.txt", "a.entry", f"{'ab' * 32}.entry", ".new-year.txt"}
    for name in strangers:
        (cache.folder / name).write_text("not the cache's", encoding="utf-8")
    assert main(["clean", str(outputs)]) == 0
    left = f"left {cache.folder}: the cache of replays, 0.0 MB, which clean --cache removes\n"
    assert capsys.readouterr().out.startswith(left)
    assert cache.read(KEY) == RESULT
    assert list(clean_from_python(outputs).left) == [str(cache.folder)]
    assert main(["clean", "--cache"]) == 0
    assert capsys.readouterr().out.startswith(f"removed {cache.folder} (")
    assert {path.name for path in cache.folder.iterdir()} == strangers
    for name in strangers:
        (cache.folder / name).unlink()
    cache.write(KEY, RESULT)
    assert clean_from_python(cache=True).removed
    assert not cache.folder.exists()
    assert main(["clean"]) == 2
