"""What a terminal, a pipe and a machine see: colours, widths, JSON, readers that go away."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
from draftquant.recipes import built_in_recipes
from draftquant.scripts.cli import main
from draftquant.scripts.frame.console import OnTerminal, print_table, table

DRAFT = str(Path(__file__).parent / "pairs" / "eagle3-llama" / "draft")
COMMAND = [sys.executable, "-m", "draftquant.scripts.cli"]
LOOK = re.compile(r"\x1b\[[0-9;]*m")
LIST, PLAN = ["recipes", "list"], ["plan", "nowhere", "--recipe", "h200"]
Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("console") / "out"
    assert main(["quantize", DRAFT, "--recipe", "h200", "--out", str(out)]) == 0
    return out


def environment(**more: str) -> dict[str, str]:
    """Ours without what a terminal may have set."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    return {**kept, "TERM": "xterm-256color", **more}


def on_terminal(arguments: list[str], **more: str) -> str:
    """What stdout and stderr show where both are a terminal."""
    ours, theirs = pty.openpty()
    command = [*COMMAND, *arguments]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment(**more)) as run:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 4096):
                shown += chunk
        except OSError:  # Linux: the other end is closed
            pass
        run.wait()
    os.close(ours)
    return shown.decode()


def piped(arguments: list[str], **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, env=environment(**more)
    )


@pytest.mark.slow
def test_a_terminal_gets_colours_and_no_color_takes_all_of_them() -> None:
    assert LOOK.search(on_terminal(LIST, COLUMNS="160"))
    assert not LOOK.search(on_terminal(LIST, COLUMNS="160", NO_COLOR="1"))
    assert LOOK.search(on_terminal(PLAN))
    assert "\x1b" not in on_terminal(PLAN, NO_COLOR="1")
    assert "\x1b" not in piped(LIST).stdout
    assert LOOK.search(piped(LIST, FORCE_COLOR="1").stdout)


def test_names_stay_whole_at_every_width(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    for columns in ("40", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(LIST) == 0
        shown = capsys.readouterr().out
        assert set(built_in_recipes()) <= set(re.split(r"[\s│┃]+", shown))
        assert max(map(len, shown.splitlines())) <= int(columns)


def test_a_pipe_folds_no_name_and_cells_are_escaped(capsys: Printed) -> None:
    names = [f"column-{number:02}" for number in range(30)]
    found = table("a\x1b[2J", *names)
    found.row("c\x1b[2J\n", *names[1:])
    print_table(found)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert set(names) <= set(re.split(r"[\s│┃]+", shown.splitlines()[2]))


def test_titles_and_names_of_columns_are_bold_and_numbers_stand_right(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    found = table("title", "name", "number", "mixed", "other")
    for cells in (("plain", "-1.5 MB", "7", "a"), ("7", "+12.25 MB", "seven", "bb"), ("x", *"   ")):
        found.row(*map(str.strip, cells))
    print_table(found)
    shown = capsys.readouterr().out
    assert re.findall(r"\x1b\[1m *([a-z]+)", shown) == ["title", "name", "number", "mixed", "other"]
    assert "│ plain │   -1.5 MB │ 7     │ a     │" in shown
    assert "│ 7     │ +12.25 MB │ seven │ bb    │" in shown


def test_errors_are_json_too(capsys: Printed) -> None:
    assert main(["--json", *PLAN]) == 2
    output = capsys.readouterr()
    error = json.loads(output.out)["error"]
    assert set(error) == {"where", "what", "fix", "details"}
    assert f"error: {error['where']}: {error['what']}\n  fix: {error['fix']}\n" in output.err


def test_a_stage_that_comes_again_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a vendor's toolkit is loaded while tensors are written."""
    monkeypatch.setattr(time, "perf_counter", count().__next__)
    heard = OnTerminal()
    for name in ("write", "start", "write", "sync"):
        heard.stage(name)
    assert heard.spent == {"write": 2, "start": 1}


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error() -> None:
    line = '"$0" -m draftquant.scripts.cli recipes list | head -n 1; echo ${PIPESTATUS[0]}'
    command = ["bash", "-c", line, sys.executable]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert (run.stderr, run.stdout.splitlines()[-1]) == ("", "0")


@pytest.mark.slow
def test_no_pipe_hides_what_verify_says(quantized: Path, tmp_path: Path) -> None:
    """Both streams lose their reader at once, and the folder is WRONG: exit code 1 all the same."""
    out = shutil.copytree(quantized, tmp_path / "out")
    *first, last = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(bytes([*first, last ^ 1]))
    read, write = os.pipe()
    os.close(read)
    command = [*COMMAND, "verify", str(out), "--against", DRAFT, "-v"]
    run = subprocess.run(command, stdout=write, stderr=write, check=False, env=environment())
    os.close(write)
    assert run.returncode == 1
