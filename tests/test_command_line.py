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
    "files of a report": (["/a/b", "--html", "/x/g.html", "--mark", "m.md", "--junit=/j.xml", "-k"],
                          ["b", "-k"]),
    "shortest": ([part for option in ("--o", "--rep", "--ht", "--mar", "--ju", "--pl", "--to")
                  for part in (option, "a")], []),
    "too short": (["--re", "--h", "--ma", "--j", "--p", "--t"],) * 2,
    "shortened out": (["--ou", "/x/o", "--o=/y", "--rep", "/z", "--json"], ["--json"]),
    "what begins alike": (["--recipe", "r", "--re", "x", "--tp", "2", "--target", "/a/m"],
                          ["--recipe", "r", "--re", "x", "--tp", "2", "--target", "m"]),
    "token": (["--token", TOKEN, f"--token={TOKEN}", "--tok", TOKEN, "x"], ["x"]),
    "token elsewhere": ([TOKEN, f"--revision={TOKEN}", f"/home/{TOKEN}/x{TOKEN}"],
                        ["hf_...", "--revision=hf_...", "xhf_..."]),
    "Hub id": (["owner/name", "owner/name@refs/pr/1"], ["owner/name", "owner/name@refs/pr/1"]),
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


def test_equal_runs_in_other_places_give_equal_bytes(tmp_path: Path) -> None:
    made = []
    for home, name in ((tmp_path / "home" / "work", "q"), (tmp_path / "somewhere", "another")):
        home.mkdir(parents=True)
        draft, out = tiny_eagle3_llama(home / "draft"), home / name
        assert main(["quantize", str(draft), "--recipe", "int4-channel", f"--out={out}"]) == 0
        made.append({path.name: path.read_bytes() for path in out.iterdir()})
        assert str(tmp_path).encode() not in made[-1]["draftquant.json"]
        assert b"somewhere" not in made[-1]["draftquant.json"]
    assert made[0] == made[1]
