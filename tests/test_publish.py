"""`publish`: the order of its steps, and nothing is left of a run that fails in one of them."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftquant.quantize.errors import OutputError, VerifyError
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.provenance import RepairedProvenance, SourceFolder
from draftquant.quantize.files.publish import SPARE_BYTES, check_faults, publish
from tiny import tiny_eagle3_llama

RECORD = RepairedProvenance(
    draftquant="0.1.0",
    argv=(),
    source=SourceFolder(hub_id=None, revision=None),
    repairs=(),
    tensor_sha256={},
)


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    folder = tiny_eagle3_llama(tmp_path / "draft")
    (folder / "nested").mkdir()
    (folder / "nested" / "notes.txt").write_text("mine", encoding="utf-8")
    return Checkpoint.open(folder)


def steps(seen: list[str], failing: str = "") -> dict[str, Any]:
    """Arguments of `publish` that note what lies in the staging folder when they are called."""

    def step(name: str, result: object = None) -> Callable[[Any], Any]:
        def run(argument: object) -> object:
            if isinstance(argument, Path):
                found = (path for path in argument.rglob("*") if path.is_file())
                files = sorted(path.relative_to(argument).as_posix() for path in found)
                seen.append(f"{name}: {' '.join(files)}")
                if name == "write":
                    (argument / "model.safetensors").write_text("tensors", encoding="utf-8")
            else:
                seen.append(f"{name}({argument})")
            if name == failing:
                raise VerifyError(name, "failed", fix="none")
            return result

        return run

    return {
        "tensor_bytes": 7,
        "write_tensors": step("write"),
        "side_files": ["nested/notes.txt", "tokenizer.json"],
        "documents": {"index.json": "{}\n", "config.json": "[]\n"},
        "verify": step("verify", "found"),
        "provenance": step("provenance", RECORD),
        "confirm": step("confirm"),
        "on_stage": step("stage"),
    }


WRITTEN = "config.json.unverified index.json model.safetensors nested/notes.txt tokenizer.json"
ORDER = [
    "stage(write)",
    "write: ",
    "stage(verify)",
    f"verify: {WRITTEN}",
    "provenance(found)",
    "confirm: config.json.unverified draftquant.json index.json model.safetensors nested/notes.txt"
    " tokenizer.json",
]


def test_steps_in_their_order(source: Checkpoint, tmp_path: Path) -> None:
    seen: list[str] = []
    assert publish(tmp_path / "out", source, **steps(seen)) == "found"
    assert seen == ORDER
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {
        "config.json", "draftquant.json", "index.json", "model.safetensors", "nested",
        "tokenizer.json",
    }  # fmt: skip
    assert (tmp_path / "out" / "nested" / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "out" / "config.json").read_text(encoding="utf-8") == "[]\n"


@pytest.mark.parametrize("failing", ["write", "verify", "provenance", "confirm"])
def test_a_step_that_fails_leaves_nothing(failing: str, source: Checkpoint, tmp_path: Path) -> None:
    seen: list[str] = []
    with pytest.raises(VerifyError, match=f"{failing}: failed"):
        publish(tmp_path / "out", source, **steps(seen, failing))
    assert seen[-1].startswith(failing)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def rewritten(staging: Path) -> None:
    """Another file in its place, with the same size and times."""
    path = staging / "model.safetensors"
    status = path.stat()
    (staging / "new").write_text("TENSORS", encoding="utf-8")
    (staging / "new").rename(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


MEDDLING: dict[str, tuple[Callable[[Path], object], str]] = {
    "a new file": (lambda s: (s / "evil.py").write_text("", encoding="utf-8"), "evil.py appeared"),
    "a new folder": (lambda s: (s / "sub").mkdir(), "sub appeared"),
    "a link": (lambda s: (s / "a").symlink_to("b"), "a appeared"),
    "more bytes": (
        lambda s: (s / "tokenizer.json").write_text("other", encoding="utf-8"),
        "tokenizer.json appeared",
    ),
    "another time": (lambda s: os.utime(s / "nested" / "notes.txt", ns=(1, 1)), "nested/notes.txt"),
    "another file in its place": (rewritten, "model.safetensors appeared, changed or vanished"),
    "one file less": (lambda s: (s / "index.json").unlink(), "index.json appeared, changed"),
    "config.json": (
        lambda s: (s / "config.json").write_text("{}", encoding="utf-8"),
        "config.json appeared",
    ),
}


@pytest.mark.parametrize("when", ["verify", "confirm"])
@pytest.mark.parametrize("name", MEDDLING)
def test_what_somebody_writes_meanwhile_is_not_published(
    name: str, when: str, source: Checkpoint, tmp_path: Path
) -> None:
    meddle, what = MEDDLING[name]
    meddled = steps([]) | {when: lambda staging: meddle(staging)}
    with pytest.raises(OutputError, match="while the folder was verified") as caught:
        publish(tmp_path / "out", source, **meddled)
    assert what in caught.value.what
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_without_provenance_there_is_no_record(source: Checkpoint, tmp_path: Path) -> None:
    without = steps([]) | {"provenance": lambda _found: None}
    publish(tmp_path / "out", source, **without)
    assert not (tmp_path / "out" / "draftquant.json").exists()


@pytest.mark.parametrize("missing", [0, 1])
def test_the_disk_must_hold_tensors_side_files_and_some_more(
    missing: int, source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(source.folder / file).stat().st_size for file in ("nested/notes.txt",
                                                                "tokenizer.json")]  # fmt: skip
    free = SimpleNamespace(free=7 + sum(sizes) + SPARE_BYTES - missing)
    monkeypatch.setattr("draftquant.quantize.files.staging.shutil.disk_usage", lambda _: free)
    seen: list[str] = []
    if missing:
        with pytest.raises(OutputError, match=f"needs {free.free + 1:,} bytes"):
            publish(tmp_path / "out", source, **steps(seen))
        assert seen == []
    else:
        publish(tmp_path / "out", source, **steps(seen))
        assert seen == ORDER


def test_an_output_in_the_source_is_refused_before_anything(source: Checkpoint) -> None:
    seen: list[str] = []
    with pytest.raises(OutputError, match="overlaps the source"):
        publish(source.folder / "out", source, **steps(seen))
    assert seen == []


def test_ten_faults_are_named(tmp_path: Path) -> None:
    check_faults(tmp_path, (), fix="none")
    with pytest.raises(VerifyError, match="not published") as caught:
        check_faults(tmp_path, [f"fault {i}" for i in range(12)], fix="report it")
    assert "fault 9" in str(caught.value)
    assert "fault 10" not in str(caught.value)
    assert caught.value.fix == "report it"
