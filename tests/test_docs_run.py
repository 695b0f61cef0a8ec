"""The shell blocks of README and of the tutorials run as they stand, in a folder like a clone.

bash expands them, a call in this process runs each command: torch is imported once. The pairs in
that folder have fewer prompts, so that a verdict may be another one.
"""

import subprocess
from pathlib import Path

import pytest
from draftquant.scripts.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/tutorials/amd.md", "docs/tutorials/nvidia.md", "docs/tutorials/ci.md")
NUM_PROMPTS = 4
VERDICTS = (0, 1, 3)  # of the gate; everything else has to succeed
_FENCE = "```"


def shell_blocks(page: str) -> str:
    """What stands between ```sh and ``` in a page."""
    parts = (ROOT / page).read_text(encoding="utf-8").split(f"\n{_FENCE}")
    return "\n".join(part.partition("\n")[2] for part in parts if part.partition("\n")[0] == "sh")


def commands_of(script: str, folder: Path) -> list[list[str]]:
    """The `draftquant` commands of a script, expanded by bash."""
    spy = 'draftquant() { printf "%s\\0" "$@" >&3; printf "\\n\\0" >&3; }\n'
    written = folder / "commands"
    with written.open("wb") as file:
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"exec 3>&1 >/dev/null\n{spy}{script}"],
            stdout=file,
            cwd=folder,
            check=True,
        )
    calls = written.read_text(encoding="utf-8").split("\0\n\0")
    return [call.split("\0") for call in calls if call]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that has the pairs where a clone has them."""
    for pair in ("eagle3-llama", "eagle3-mla", "dflash"):
        source, copy = ROOT / "tests/pairs" / pair, tmp_path / "tests/pairs" / pair
        copy.mkdir(parents=True)
        for name in ("draft", "target"):
            (copy / name).symlink_to(source / name)
        for name in ("prompts.jsonl", "calibration.jsonl"):
            lines = (source / name).read_text(encoding="utf-8").splitlines(keepends=True)
            (copy / name).write_text("".join(lines[:NUM_PROMPTS]), encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_run(
    page: str, clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = commands_of(shell_blocks(page), clone)
    assert len(commands) >= 4
    monkeypatch.chdir(clone)
    for command in commands:
        code = main(command)
        assert code in (VERDICTS if command[0] == "gate" else (0,)), (command, capsys.readouterr())
