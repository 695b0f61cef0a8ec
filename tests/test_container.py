"""Containerfile: its step that installs is the one that `check_wheel` runs, with the wheel."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_step_that_installs_is_the_one_that_is_run() -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text(encoding="utf-8"))
    installs = next(line for line in text.splitlines() if line.startswith("RUN "))
    source = 'ROOT="$1"; source "$1/scripts/check_wheel.sh"; install_step'
    words = ["bash", "-c", source, "bash", str(ROOT)]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == installs.removeprefix("RUN ")
    assert '"draftquant[${EXTRAS}]"' in run.stdout
