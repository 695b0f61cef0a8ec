"""Killed runs and failing disks, a handful of each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COMMANDS = ["dequantize", "quantize", "record"]


def in_a_process(code: str, folder: Path) -> str:
    """Forks start from a process that has computed nothing, which pytest has not."""
    command = (sys.executable, "-c", code, str(folder / "work"))
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.check_output(command, text=True, env=os.environ | {"PYTHONPATH": path})


KILLS = """
import sys; from pathlib import Path
import killed_runs
{}
runs, problems = killed_runs.kill_runs(Path(sys.argv[1]), kills={}, signals={}, seed=1, divide=64,
                                       new_tokens=32)
print(len(problems), runs, *problems, sep="\\n")
"""
FAULTS = """
import sys; from pathlib import Path
import failing_calls
{}
found = failing_calls.fail_calls(Path(sys.argv[1]), every={})
assert sorted(found.calls) == {}
assert all(seen.total() > 2 for seen in found.outcomes.values())
print(len(found.problems), *sorted({{call for calls in found.calls.values() for call in calls}}))
"""


def test_killed_runs_leave_nothing_wrong(tmp_path: Path) -> None:
    assert in_a_process(KILLS.format("", 4, 3), tmp_path).split() == ["0", "7"]


def test_failing_calls_leave_nothing_wrong(tmp_path: Path) -> None:
    said = in_a_process(FAULTS.format("", 59, COMMANDS), tmp_path).split()
    assert said[0] == "0"
    calls = {"copy_file_range", "fsync", "preadv", "pwrite", "rename", "sendfile", "write"}
    assert calls <= {*said[1:]}
