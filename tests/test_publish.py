"""`publish`: the order of its steps, and nothing is left of a run that fails in one of them."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.provenance import GraftedProvenance, Provenance, SourceFolder
from draftquant.quantize.files.publish import SPARE_BYTES, Rewrite, publish
from draftquant.quantize.verify import Fault, check_faults
from draftquant.recipes.errors import OutputError, VerifyError
from tiny import tiny_eagle3_llama

RECORD = GraftedProvenance(
    draftquant="0.1.0",
    argv=(),
    layers=(),
    target={},
    tensor_digests={},
    source=SourceFolder(hub_id=None, revision=None),
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
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {
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
    sizes = (
        source.folder.joinpath(f).stat().st_size for f in ("nested/notes.txt", "tokenizer.json")
    )
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
