"""What a terminal, a pipe and a machine see: colours, widths, JSON, readers that go away."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from draftquant.recipes import built_in_recipes
from draftquant.scripts.cli import main
from draftquant.scripts.frame.console import print_table, table

pytestmark = pytest.mark.slow

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
DRAFT = str(PAIR / "draft")
COMMAND = [sys.executable, "-m", "draftquant.scripts.cli"]
LOOK = re.compile(r"\x1b\[[0-9;]*m")


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
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=theirs, stderr=theirs, env=environment(**more)
    ) as run:
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


# Colours


def test_a_terminal_gets_colours_and_no_color_takes_all_of_them() -> None:
    assert LOOK.search(on_terminal(["recipes", "list"], COLUMNS="160"))
    assert not LOOK.search(on_terminal(["recipes", "list"], COLUMNS="160", NO_COLOR="1"))
    assert LOOK.search(on_terminal(["plan", "nowhere", "--recipe", "h200"]))
    assert "\x1b" not in on_terminal(["plan", "nowhere", "--recipe", "h200"], NO_COLOR="1")


def test_force_color_colours_a_pipe() -> None:
    assert "\x1b" not in piped(["recipes", "list"]).stdout
    assert LOOK.search(piped(["recipes", "list"], FORCE_COLOR="1").stdout)


def test_bars_are_for_terminals_and_have_no_colours_with_no_color(quantized: Path) -> None:
    verify = ["verify", str(quantized), "--against", DRAFT]
    assert "\x1b[2K" in on_terminal(verify)
    plain = on_terminal(verify, NO_COLOR="1")
    assert "\x1b[2K" in plain
    assert not LOOK.search(plain)
    assert "\x1b[2K" not in on_terminal(verify, TERM="dumb")
    run = piped([*verify, "-v"], FORCE_COLOR="1")
    assert "\x1b[2K" not in run.stderr
    assert re.search(r"^verify: [0-9.]+ MB in [0-9.]+ s, [0-9,]+ MB/s$", run.stderr, re.M)


# Widths


def words(text: str) -> set[str]:
    return set(re.split(r"[\s│┃]+", text))


@pytest.mark.parametrize(("arguments", "columns"), [
    (["recipes", "list"], "40"), (["recipes", "list"], "100"), (["inspect", DRAFT], "60"),
])  # fmt: skip
def test_names_stay_whole_at_every_width(
    arguments: list[str],
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert set(built_in_recipes()) <= words(shown)
    if arguments[0] == "inspect":
        assert "midlayer.self_attn.q_proj.weight" in words(shown)
        return
    assert max(map(len, shown.splitlines())) <= int(columns)


def test_a_narrow_terminal_does_without_spare_columns_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(columns: str) -> str:
        monkeypatch.setenv("COLUMNS", columns)
        found = table("Heading", "name", "spare", "number", right=("number",), spare=("spare",))
        found.row("a-name-of-20-letters", "ten-letters", "1,234")
        found.add_section()
        found.row("total", "", "1,234")
        print_table(found)
        return capsys.readouterr().out

    assert "spare" in shown("60").splitlines()[2]
    without = shown("40")
    assert "a-name-of-20-letters │  1,234 │" in without
    assert "a wider terminal, or --json, also shows: spare" in " ".join(without.split())
    stacked = shown("26")
    assert "│" not in stacked
    assert "a-name-of-20-letters\n  spare   ten-letters\n  number  1,234\n" in stacked


def test_a_pipe_folds_no_name_and_stacks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"column-{number:02}" for number in range(30)]
    found = table("Wide", *names)
    found.row(*names)
    print_table(found)
    lines = capsys.readouterr().out.splitlines()
    assert all(name in lines[2] and name in lines[4] for name in names)


def test_cells_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    found = table("a\x1b[2J", "b\x1b[2J")
    found.row("c\x1b[2J\n")
    print_table(found)
    assert "\x1b" not in capsys.readouterr().out


# JSON


@pytest.mark.parametrize("arguments", [
    ["plan", "--json"], ["--json", "plan", "nowhere", "--recipe", "h200"],
])  # fmt: skip
def test_errors_are_json_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as exc:
        code = int(exc.code or 0)
    output = capsys.readouterr()
    assert code == 2
    error = json.loads(output.out)["error"]
    assert set(error) == {"where", "what", "fix", "details"}
    assert f"error: {error['where']}: {error['what']}\n" in output.err
    assert f"  fix: {error['fix']}\n" in output.err


# How much is said


def test_quiet_leaves_notes_out_and_verbose_adds_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", DRAFT, "--recipe", "mi325x"]
    assert main(plan) == 0
    assert capsys.readouterr().err.startswith("recipe mi325x is mi325x-fp8: FP8 per-channel")
    assert main([*plan, "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*plan, "-v"]) == 0
    assert re.match(r"draftquant [^,]+, torch [^,]+, .*Python 3", capsys.readouterr().err)
    assert main([*plan, "-q", "-v"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["plan", str(tmp_path / "none"), "--recipe", "h200", "-q"]) == 2
    assert "error:" in capsys.readouterr().err


# Readers that go away


@pytest.mark.parametrize("arguments", [["recipes", "list"], ["recipes", "list", "--json"]], ids=str)
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    shell = shutil.which("bash")
    assert shell
    line = (
        f'"$0" -m draftquant.scripts.cli {" ".join(arguments)} | head -n 1; echo ${{PIPESTATUS[0]}}'
    )
    run = subprocess.run(
        [shell, "-c", line, sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1] == "0"


def test_no_pipe_hides_what_verify_says(quantized: Path, tmp_path: Path) -> None:
    """Both streams lose their reader at once, and the folder is WRONG: exit code 1 all the same."""
    out = tmp_path / "out"
    shutil.copytree(quantized, out)
    weights = out / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [*COMMAND, "verify", str(out), "--against", DRAFT, "-v"],
        stdout=write,
        stderr=write,
        check=False,
        env=environment(),
    )
    os.close(write)
    assert run.returncode == 1
