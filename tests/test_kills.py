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
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


KILLS = """
import sys; from pathlib import Path
import killed_runs
{}
found = killed_runs.kill_runs(Path(sys.argv[1]), kills={}, signals={}, seed=1, divide=64,
                              new_tokens=32)
print(len(found.problems), sum(seen["runs"] for seen in found.outcomes.values()))
print(*found.problems, sep="\\n")
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
    assert in_a_process(KILLS.format("", 4, 3), tmp_path).strip() == "0 7"


def test_a_run_that_leaves_its_config_first_is_found_out(tmp_path: Path) -> None:
    """What the test of kills is there for: config.json in place while all else is written."""
    early = """
from draftquant.quantize.files import publish
publish.UNVERIFIED = ""
plain = publish.staged_output
publish.staged_output = lambda out, last, check: plain(out)
write = publish.copy_side_files
def slow(*arguments):
    (arguments[1] / "config.json").write_text("{}")
    if to_be_killed:
        time.sleep(600)
    write(*arguments)
publish.copy_side_files = slow
import time
from types import SimpleNamespace
to_be_killed, kill = False, killed_runs._kill
def kill_slowly(*arguments):
    global to_be_killed
    to_be_killed = True  # for the fork that begins now
    return kill(*arguments)
def while_it_sleeps(_seconds):
    global to_be_killed
    to_be_killed = False
    while not list(Path(sys.argv[1]).rglob(".*.staging/config.json")):
        time.sleep(0.01)
killed_runs._kill = kill_slowly
killed_runs.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=while_it_sleeps)
from draftquant.quantize.making import quantize_draft, rewriting
for module in (rewriting, quantize_draft):
    module.UNVERIFIED_CONFIG_FILE = "config.json"
"""
    said = in_a_process(KILLS.format(early, 1, 0), tmp_path)
    assert "config.json in a staging folder that is not whole" in said


def test_failing_calls_leave_nothing_wrong(tmp_path: Path) -> None:
    said = in_a_process(FAULTS.format("", 59, COMMANDS), tmp_path).split()
    assert said[0] == "0"
    assert {"copy_file_range", "fsync", "preadv", "pwrite", "rename", "sendfile", "write"} <= set(
        said[1:]
    )


# ---- the disk that fails


def write_text(path: Path) -> None:
    path.write_text("x" * 100, encoding="utf-8")
