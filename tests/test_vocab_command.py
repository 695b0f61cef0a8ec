"""`draftquant vocab`: the folder that it writes accepts what the curve said; what it refuses."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from draftquant import api as dq
from draftquant.recipes.errors import GateError
from draftquant.scripts.cli import main
from said_traces import write_said
from tiny import tiny_eagle3_llama

pytestmark = pytest.mark.usefixtures("one_thread")

K, SIZE = 3, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocab")
    tiny_eagle3_llama(folder / "draft")
    write_said(folder / "traces", prompts=12)
    write_said(folder / "others", prompts=12, seed=1)
    return folder


def ask(folder: Path, *words: str) -> list[str]:
    return ["vocab", str(folder / "draft"), "--traces", str(folder / "traces"), *words]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_folder_accepts_what_the_curve_says(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    judged = ("--judge", str(folder / "others"), "--sizes", str(SIZE))
    curve = printed(capsys, *ask(folder, "--curve", *judged))
    written = printed(capsys, *ask(folder, "--size", str(SIZE), "--out", out))
    assert written["cut"]["size"] == len(written["rows"]["target_ids"]) == SIZE
    assert written["cut"]["verification"]["ok"]
    assert 0 < written["rows"]["held_out"] < written["rows"]["coverage"] <= 1
    (replay,) = dq.replay([out], folder / "others", num_draft_tokens=K)
    (one,) = curve["curve"]["chosen"]["whole"]
    assert (one["size"], curve["num_rows"], curve["prompts"]) == (SIZE, 96, 12)
    assert replay.counts.mean_acceptance_length == pytest.approx(one["acceptance_length"])
    assert curve["curve"]["off_domain"]["whole"][0]["size"] == SIZE
    read = curve["estimate"]["drafting_bytes"]
    # Every step of three reads 72 rows of 64 BF16 numbers less, and an offset of 8 bytes more.
    assert int(read["96"]) - int(read[str(SIZE)]) == K * (72 * 64 * 2 - 8)
    with pytest.warns(dq.DraftQuantWarning) as warned:
        again = dq.vocab(out, folder / "traces", curve=True, sizes=[12], num_draft_tokens=K)
    said = [str(one.message) for one in warned]
    assert any("have no row in the draft, which has 24" in one for one in said)
    assert any("chose the rows that the draft has (12 of them)" in one for one in said)
    with pytest.raises(GateError, match="12 of its 12 prompts chose the rows that the draft has"):
        dq.vocab(out, folder / "others", curve=True, judge=folder / "traces", sizes=[12])
    assert again.curve is not None
    assert again.curve.coverage < 1


MISTAKES = (
    ("", "one of the arguments --size --coverage --curve is required", "for example"),
    ("--size 9 --curve", "not allowed with argument", "leave one of the two out"),
    ("--size 24", "--out: is missing", "name the folder to create"),
    ("--curve --out o", "--out: the curve writes no rows", "--size N --out FOLDER"),
    ("--size 24 --out o --gpu h200", "--gpu: is of use for the curve only", "leave it out"),
    ("--size 96 --out o", "fewer than the 96 rows", "--curve shows what sizes cost"),
    ("--curve --sizes 24,9", "--sizes: expected from 10", "ask for another size"),
    ("--coverage 101% --out o", "above 0, up to 1, got 1.01", "for example 99.5%"),
    ("--curve --draft-sampling probabilistic", "probabilistic proposals", "draftquant replay"),
    ("--curve --counts none.json", "cannot be read: No such file", "write one JSON array"),
    ("--curve --judge TRACES", "12 of its 12 prompts are among those that choose", "other pr"),
    ("--curve --concurrency 0", "--concurrency: expected at least 1", "such as 1,8,64"),
)


def test_what_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, what, fix in MISTAKES:
        given = words.replace("TRACES", str(folder / "traces"))
        with suppress(SystemExit):  # of the parser; the exit code is tested where all of them are
            assert main(ask(folder, *given.split())) == 2
        assert list(tmp_path.iterdir()) == []
        said = " ".join(capsys.readouterr().err.split())
        assert what in said
        assert fix in said
