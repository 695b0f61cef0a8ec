"""`publish`: the order of its steps, and nothing is left of a run that fails in one of them."""

import dataclasses
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from by_recipe import quantized
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces.writer import trace_output
from draftquant.quantize.files import publish as publish_module
from draftquant.quantize.files import staging as staging_module
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.provenance import GraftedProvenance, Provenance, SourceFolder
from draftquant.quantize.files.publish import (
    SPARE_BYTES,
    Flushing,
    LinkChoice,
    Rewrite,
    hard_links_work,
    place,
    publish,
)
from draftquant.quantize.files.staging import check_output, staged_output, write_text
from draftquant.quantize.making.dequantize_draft import dequantize_draft
from draftquant.quantize.verify import Fault, check_faults
from draftquant.recipes.errors import OutputError, VerifyError
from draftquant.scripts.cli import main
from test_traces import AUX, TARGET, TRACES
from tiny import tiny_eagle3_llama

UNKNOWN = SourceFolder(hub_id=None, revision=None)
RECORD = GraftedProvenance(
    draftquant="0.1.0", argv=(), layers=(), target={}, tensor_digests={}, source=UNKNOWN
)


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    folder = tiny_eagle3_llama(tmp_path / "draft")
    (folder / "nested").mkdir()
    (folder / "nested" / "notes.txt").write_text("mine", encoding="utf-8")
    return Checkpoint.open(folder)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Noting(Rewrite[str]):
    """Notes what lies in the staging folder at each step; `failing` fails, `meddle` does more."""

    seen: list[str] = dataclasses.field(default_factory=list)
    failing: str = ""
    record: Provenance | None = RECORD
    meddle: Mapping[str, Callable[[Path], object]] = dataclasses.field(default_factory=dict)

    def step(self, name: str, staging: Path) -> None:
        found = (path for path in staging.rglob("*") if path.is_file())
        files = sorted(path.relative_to(staging).as_posix() for path in found)
        self.seen.append(f"{name}: {' '.join(files)}")
        if name in self.meddle:
            self.meddle[name](staging)
        self.fail(name)

    def fail(self, name: str) -> None:
        if name == self.failing:
            raise VerifyError(name, "failed", fix="none")

    def write_tensors(self, staging: Path) -> None:
        self.step("write", staging)
        (staging / "model.safetensors").write_text("tensors", encoding="utf-8")

    def verify(self, staging: Path) -> str:
        self.step("verify", staging)
        return "found"

    def provenance(self, found: str) -> Provenance | None:
        self.seen.append(f"provenance({found})")
        self.fail("provenance")
        return self.record

    def confirm(self, staging: Path, found: str) -> str:
        self.step("confirm", staging)
        return f"{found} and confirmed"

    def publish(self) -> str:
        return publish(self, lambda stage: self.seen.append(f"stage({stage})"))


def noting(source: Checkpoint, out: Path, **more: Any) -> Noting:
    return Noting(
        out=out,
        folder=source.folder,
        tensor_bytes=7,
        side_files=["nested/notes.txt", "tokenizer.json"],
        documents={"index.json": "{}\n", "config.json": "[]\n"},
        **more,
    )


WRITTEN = "config.json.unverified index.json model.safetensors nested/notes.txt tokenizer.json"
ORDER = [
    "stage(write)",
    "write: ",
    "stage(verify)",
    f"verify: {WRITTEN}",
    "provenance(found)",
    "confirm: config.json.unverified draftquant.json index.json model.safetensors nested/notes.txt"
    " tokenizer.json",
    "stage(sync)",
]


def test_steps_in_their_order(source: Checkpoint, tmp_path: Path) -> None:
    rewrite = noting(source, tmp_path / "out")
    assert rewrite.publish() == "found and confirmed"
    assert rewrite.seen == ORDER
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "draftquant.json", "index.json", "model.safetensors", "nested",
        "tokenizer.json",
    }  # fmt: skip
    assert (tmp_path / "out" / "nested" / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "out" / "config.json").read_text(encoding="utf-8") == "[]\n"


def test_a_step_that_fails_leaves_nothing(source: Checkpoint, tmp_path: Path) -> None:
    for failing in ("write", "verify", "provenance", "confirm"):
        rewrite = noting(source, tmp_path / "out", failing=failing)
        with pytest.raises(VerifyError, match=f"{failing}: failed"):
            rewrite.publish()
        assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def flipped(staging: Path, file: str = "model.safetensors", *, in_place: bool = True) -> None:
    """Another last byte, in the same file or in its place, with the same size and times."""
    path = staging / file
    status, content = path.stat(), path.read_bytes()
    time.sleep(0.02)  # kernels tell times of change apart by some milliseconds
    if not in_place:
        path.unlink()
    path.write_bytes(content[:-1] + b"?")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


MEDDLING: list[tuple[str, Callable[[Path], object], str]] = [
    ("verify", lambda s: (s / "evil.py").write_text("", encoding="utf-8"), "evil.py"),
    ("confirm", partial(flipped, in_place=False), "model.safetensors"),
    ("verify", flipped, "model.safetensors"),
    ("confirm", lambda s: (s / "index.json").unlink(), "index.json"),
    ("verify", lambda s: (s / "config.json").write_text("{}", encoding="utf-8"), "config.json"),
]


@pytest.mark.parametrize(("when", "meddle", "what"), MEDDLING)
def test_what_somebody_writes_meanwhile_is_not_published(
    when: str, meddle: Callable[[Path], object], what: str, source: Checkpoint, tmp_path: Path
) -> None:
    rewrite = noting(source, tmp_path / "out", meddle={when: meddle})
    with pytest.raises(OutputError, match="while the folder was verified") as caught:
        rewrite.publish()
    assert caught.value.what.startswith(f"{what} appeared")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("file", ["draftquant.json", "nested/notes.txt"])
def test_what_somebody_writes_at_last_is_not_published(
    file: str, source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While folders are brought to the disk, config.json having its name."""

    def meddle(folder: Path) -> None:
        if (folder / "config.json").exists() and folder.name != "draft":
            flipped(folder, file)

    monkeypatch.setattr("draftquant.quantize.files.staging.sync", meddle)
    with pytest.raises(OutputError, match="while the folder was verified") as caught:
        noting(source, tmp_path / "out").publish()
    assert caught.value.what.startswith(f"{file} appeared")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_the_disk_must_hold_tensors_side_files_and_some_more(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ((source.folder / f).stat().st_size for f in ("nested/notes.txt", "tokenizer.json"))
    needed = 7 + sum(sizes) + SPARE_BYTES
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr("draftquant.quantize.files.staging.shutil.disk_usage", lambda _: free)
    rewrite = noting(source, tmp_path / "out")
    with pytest.raises(OutputError, match=f"needs {needed:,} bytes"):
        rewrite.publish()
    assert rewrite.seen == []
    free.free = needed
    rewrite.publish()


def test_ten_faults_are_named(tmp_path: Path) -> None:
    check_faults(tmp_path, tmp_path, (), fix="none")
    faults = [Fault(f"fault {i}", "a", "b") for i in range(12)]
    with pytest.raises(VerifyError, match=r"not published[^$]*fault 9") as caught:
        check_faults(tmp_path, tmp_path, faults, fix="report it")
    assert "fault 10" not in str(caught.value)


# ---- staged output: a folder appears whole or not at all, and nothing existing is touched


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


def test_an_unsure_name_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for link, end in (("link", source), ("broken", absent)):
        (tmp_path / link).symlink_to(end)
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


# ---- what is published is on the disk before the rename


Files = dict[tuple[int, int], tuple[int, int]]
"""Device and inode -> size and time of change when a file reached the disk."""


def seen(status: os.stat_result) -> Files:
    return {(status.st_dev, status.st_ino): (status.st_size, status.st_mtime_ns)}


@contextmanager
def nothing_is_lost(out: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A power cut after publishing may take nothing of the folder, nor its name."""
    synced: list[Files] = [{}]  # before each rename to the output, and after
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced[-1].update(seen(os.fstat(descriptor)))

    def watched_rename(source: Path, target: Path) -> None:
        if Path(target) == out:
            synced.append({})
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "rename", watched_rename)
        yield
    before, after = synced  # published by one rename
    for path in (out, *out.rglob("*")):
        assert seen(path.stat()).items() <= before.items(), path
    assert seen(out.parent.stat()).keys() <= after.keys()


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_eagle3_llama(tmp_path_factory.mktemp("durable") / "draft", sharded=True)
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "deep" / "deeper" / "notes.txt").write_text("travels too", encoding="utf-8")
    return folder


def test_drafts(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    with nothing_is_lost(packed, monkeypatch):
        quantized(draft, "blackwell-fp8", packed)
    with nothing_is_lost(plain, monkeypatch):
        dequantize_draft(DraftSource(folder=packed), plain)
    shared = {"deep", "draftquant.json", "config.json"}
    assert {path.name for path in packed.iterdir()} >= {"hf_quant_config.json", *shared}
    assert {path.name for path in plain.iterdir()} >= shared


def test_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        nothing_is_lost(tmp_path / "out", monkeypatch),
        trace_output(tmp_path / "out", GREEDY.manifest(TARGET, AUX), shard_bytes=1) as writer,
    ):
        for position, trace in enumerate(TRACES):
            writer.add(trace, position=position)
    assert len(list((tmp_path / "out").iterdir())) == 1 + len(TRACES)


# ---- while it is written

_fail = Mock(side_effect=OSError(5, "Input/output error"))


def test_files_are_synced_while_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an early error is told where all is waited for: the kernel tells it once."""
    seen = threading.Event()

    def failing(_descriptor: int) -> None:
        seen.set()
        _fail()

    monkeypatch.setattr(os, "fdatasync", failing)
    with Flushing(tmp_path) as disk:
        (tmp_path / "file").write_bytes(b"x")
        assert seen.wait(10)
        disk.finish()
        with pytest.raises(OSError, match="Input/output error"):
            disk.wait()


def test_a_disk_that_fails_during_verification_publishes_nothing(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flushing, "_sync", _fail)
    with pytest.raises(OutputError, match="Input/output error"):
        quantized(draft, "int4-channel", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- a file of the target has a second name in the output, or is copied

PLACED = {"hard": "hard link", "symbolic": "symbolic link", "none": "copy"}


@pytest.mark.parametrize("how", PLACED)
def test_a_file_is_placed(how: LinkChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given by a name that only leads there from here."""
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    file, link, into = (Path(name) for name in ("file", "link", "out/into"))
    file.write_bytes(bytes(range(256)) * 9)
    link.symlink_to(file)
    assert place(link, into, how) == PLACED[how]
    assert into.read_bytes() == file.read_bytes()
    assert into.samefile(file) == (how != "none")
    assert into.is_symlink() == (how == "symbolic")


@pytest.mark.parametrize("code", ["EXDEV", "EPERM", "EMLINK", "ENOTSUP", "EACCES"])
def test_where_hard_links_do_not_work_files_are_copied(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, into = tmp_path / "file", tmp_path / "into"
    file.write_bytes(b"bytes")
    assert hard_links_work(file, tmp_path, "probe")
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(getattr(errno, code), code)))
    assert not hard_links_work(file, tmp_path, "probe")
    assert place(file, into, "hard") == "copy"
    assert into.read_bytes() == b"bytes"
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    for call in (partial(hard_links_work, file, tmp_path, "p"), partial(place, file, into, "hard")):
        with pytest.raises(OSError, match="full"):
            call()


def test_a_file_that_shrinks_while_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    monkeypatch.setattr(publish_module, "copy_range", Mock(return_value=4))
    with pytest.raises(OSError, match=r"became shorter .*/file'$"):
        place(tmp_path / "file", tmp_path / "into", "none")
