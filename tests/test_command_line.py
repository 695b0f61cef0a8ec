"""The command line in provenance: names, no paths, no output, no token; equal runs, equal bytes."""

from pathlib import Path

import pytest
from draftquant.quantize.files.hub import recorded_argv
from draftquant.scripts.cli import main
from tiny import tiny_eagle3_llama

TOKEN = "hf_" + "a1B2" * 8
CASES: dict[str, tuple[list[str], list[str]]] = {
    "paths": (["/bin/draftquant", "quantize", "/home/me/drafts/eagle/"],
              ["draftquant", "quantize", "eagle"]),
    "value of an option": (["--traces", "../secret/t", "--traces=/secret/t2"],
                           ["--traces", "t", "--traces=t2"]),
    "out and report": (["a", "--out", "/x/o", "--report=/r", "--json", "--plot", "p", "--out=o"],
                       ["a", "--json"]),
    "shortened out": (["--ou", "/x/o", "--o=/y", "--rep", "/z", "--json"], ["--json"]),
    "what begins alike": (["--recipe", "r", "--re", "x", "--tp", "2", "--target", "/a/m"],
                          ["--recipe", "r", "--re", "x", "--tp", "2", "--target", "m"]),
    "out at the end": (["a", "--out"], ["a"]),
    "token": (["--token", TOKEN, f"--token={TOKEN}", "--tok", TOKEN, "x"], ["x"]),
    "token elsewhere": ([TOKEN, f"--revision={TOKEN}", f"/home/{TOKEN}/x{TOKEN}"],
                        ["hf_...", "--revision=hf_...", "xhf_..."]),
    "Hub id": (["owner/name", "owner/name@refs/pr/1"], ["owner/name", "owner/name@refs/pr/1"]),
    "numbers": (["-k", "3", "--input-scale", "1.0"], ["-k", "3", "--input-scale", "1.0"]),
    "file name that looks like nothing": ([".", "..", "a b", ""], [".", "..", "a b", ""]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_recorded(name: str) -> None:
    argv, recorded = CASES[name]
    assert recorded_argv(argv) == tuple(recorded)
    assert recorded_argv(recorded) == tuple(recorded)


def test_a_folder_that_reads_like_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recorded_argv(["drafts/eagle"]) == ("drafts/eagle",)
    (tmp_path / "drafts" / "eagle").mkdir(parents=True)
    assert recorded_argv(["drafts/eagle"]) == ("eagle",)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def runs(home: Path, name: str) -> list[Path]:
    """Quantize and dequantize below `home`, with outputs named after `name`."""
    home.mkdir(parents=True)
    draft = tiny_eagle3_llama(home / "draft")
    int4, plain = (home / f"{name}-{what}" for what in ("int4", "plain"))
    recipe = ["--recipe", "int4-channel"]
    assert main(["quantize", str(draft), *recipe, f"--out={int4}"]) == 0
    assert main(["dequantize", str(int4), "--out", str(plain)]) == 0
    return [int4, plain]


def test_equal_runs_in_other_places_give_equal_bytes(tmp_path: Path) -> None:
    one = runs(tmp_path / "home" / "me" / "work", "q")
    two = runs(tmp_path / "somewhere", "q")
    for first, second in zip(one, two, strict=True):
        assert files_of(first) == files_of(second)
        record = (first / "draftquant.json").read_text(encoding="utf-8")
        assert str(tmp_path) not in record
        assert "somewhere" not in record
        assert first.name not in record or first.name == "q-int4"  # as the argument of others
    other = runs(tmp_path / "third", "another-name")
    assert files_of(one[0]) == files_of(other[0])
