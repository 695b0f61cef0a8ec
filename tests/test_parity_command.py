"""The verbs of `parity`: each says what it does, and refuses what it cannot read."""

from pathlib import Path

import pytest
from draftquant.scripts.cli import main
from draftquant.validate.measure.measurement_file import line_of
from handmade_runs import SPECULATION, record, run


def test_divergence_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One wrong token in 30 prompts; a report is written whatever the verdict."""
    told = {"top_gap": (3.0,) * 8, "token_logprob": (-0.1,) * 8}
    rounds = told | {"histogram": (7, 0, 0, 0)}
    wrong = record(7, (0, 1, 9, 3, 4, 5, 6, 7), **rounds)
    others = [record(i, range(8), **rounds) for i in range(30)]
    asked = {"num_top_logprobs": 2}
    runs = {
        "plain": run([record(i, range(8), **told) for i in range(30)], **asked),
        "right": run(others, speculation=SPECULATION, **asked),
        "wrong": run([*others[:7], wrong, *others[8:]], speculation=SPECULATION, **asked),
    }
    for name, one in runs.items():
        lines = [line_of(one.setup), *map(line_of, one.records)]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    command = ["parity", "divergence", str(tmp_path / "plain")]
    assert main([*command, str(tmp_path / "right")]) == 0
    both = [*command, str(tmp_path / "right"), str(tmp_path / "wrong")]
    report = tmp_path / "report.json"
    assert main([*both, "--report", str(report)]) == 1
    printed = capsys.readouterr().out
    assert "FAIL: wrong: unexplained divergences: 29 of 30 outputs are identical" in printed
    assert "prompt p7 at output token 2 (a gap of 3.000)" in printed
    assert report.is_file()
    assert main([*both, "--report", str(report)]) == 2
    error = capsys.readouterr().err
    assert (
        "report.json: this report file already exists\n  fix: pass --overwrite to replace it"
        in error
    )
    assert main([*both, "--report", str(report), "--overwrite"]) == 1
    assert main([*both, "--report", str(tmp_path / "none" / "report.json")]) == 2
    assert main([*command, str(tmp_path / "gone")]) == 2
    assert "gone" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "right"), "--min-prompts", "31"]) == 3
